"""Count the instructions of the Triton kernels' innermost loops in compiled code, without a GPU.

python -m benchmarks.instruction_counts --capability 90 --only attention --only Q4_K

An iteration of attention's loop takes a tile of keys, and one of a product's loop some weights. The figures are a
warp's instructions per iteration, by kind, and for products also the instructions of all threads per weight. Kinds
differ in throughput: conversions of single numbers run on a separate, slower unit.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.gpu.compiling import DEVICE, CompiledKernel, Instruction, innermost_loops, no_device
from paged_sdk.kernels.attention_inputs import LayerCache, PagedRows, ScoreOptions
from paged_sdk.kernels.key_offsets import KEY_SPAN
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, BlockMatrix, tensor_type_of
from paged_sdk.kernels.quantized.repack import repack
from paged_sdk.kernels.quantized.triton_blocks import CHUNK, TritonBlockMatrix

__all__ = ["Case", "as_table", "attention_cases", "counts", "kind_of", "linear_cases", "main"]

Case: TypeAlias = tuple[str, Callable[[], object]]

_LEAST: Final = 32  # shorter loops are ignored

_OPCODES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "matrix": "HMMA IMMA DMMA HGMMA QGMMA IGMMA UTCHMMA UTCQMMA UTCIMMA",
        "global": "LDG LDGSTS STG LD ST ATOMG RED UBLKCP UTMALDG UTMASTG",
        "spilled": "LDL STL",
        "shared": "LDS LDSM STS STSM SHFL MOVM LDTM STTM LDT STT",
        "conversion": "F2F F2I I2F F2IP I2IP",
        "pair conversion": "F2FP I2FP",
        "float": "FADD FMUL FFMA FMNMX FMNMX3 FSEL FSETP FSET FCHK HADD2 HMUL2 HFMA2 HMNMX2 HSETP2 FADD2 FMUL2 FFMA2",
        "special": "MUFU",
        "other": "BAR SYNCS DEPBAR LDGDEPBAR ARRIVES WARPGROUP WARPSYNC BSSY BSYNC BRA NOP MEMBAR FENCE ERRBAR CCTL "
        "BREAK EXIT CALL RET YIELD WARPGROUPSET UTCBAR UCGABAR_ARV UCGABAR_WAIT",
    }
)
_KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {opcode: kind for kind, opcodes in _OPCODES.items() for opcode in opcodes.split()}
)
_INTEGER: Final = "integer"


def kind_of(instruction: Instruction) -> str:
    """Return the kind of an instruction; instructions that no list has move data or compute integers."""
    return _KINDS.get(instruction.opcode.split(".")[0], _INTEGER)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=DEVICE)


def attention_cases(heads: tuple[int, int, int] = (32, 8, 128)) -> Iterator[Case]:
    """Yield decode and prefill chunks over caches of each kind.

    :param heads: number of query heads, number of KV heads, and head_dim
    """
    from paged_sdk.kernels.triton.paged_attention import paged_attention

    num_heads, num_kv_heads, head_dim = heads
    scores = ScoreOptions(scale=head_dim**-0.5)
    pages = (1024, 32, num_kv_heads, head_dim)
    plain = _empty(*pages, dtype=torch.bfloat16)
    codes = _empty(*pages, dtype=torch.float8_e4m3fn)
    scale = _empty(*pages[:3], dtype=torch.float32)
    offsets = _empty(8192 // KEY_SPAN, num_kv_heads, head_dim, dtype=torch.float32)
    caches = {
        "bf16": LayerCache(plain, torch.empty_like(plain)),
        "f8e4m3": LayerCache(codes, torch.empty_like(codes), scale, scale),
        "f8e4m3 with key offsets": LayerCache(codes, torch.empty_like(codes), scale, scale, offsets),
    }
    for cache_name, cache in caches.items():
        for what, num_rows, num_tokens in (("decode", 256, 1), ("chunk of a prompt", 1, 2048)):
            rows = PagedRows(
                block_tables=_empty(num_rows, 256, dtype=torch.int32),
                context_lens=_empty(num_rows, dtype=torch.int32),
                cu_seqlens_q=_empty(num_rows + 1, dtype=torch.int32),
                max_seqlen_q=num_tokens,
                max_context_len=8192,
            )
            query = _empty(num_rows * num_tokens, num_heads, head_dim, dtype=torch.bfloat16)
            yield f"attention, {cache_name}, {what}", partial(paged_attention, query, cache, rows, scores)


def linear_cases(names: Sequence[str] = ("Q4_K", "Q6_K", "Q8_0")) -> Iterator[Case]:
    """Yield products of matrices in GGUF's types with rows of bfloat16."""
    from paged_sdk.kernels.triton.quantized_linear import quantized_linear

    for name in names:
        for num_rows in (1, 4, 16, 64, 255):  # from 256 rows on, the matrix is dequantized first
            x = _empty(num_rows, 4096, dtype=torch.bfloat16)
            yield f"{name}, {num_rows} rows", partial(quantized_linear, x, _matrix(name))


def _matrix(name: str) -> TritonBlockMatrix:
    tensor_type = tensor_type_of(name)
    form = BLOCK_FORMATS[tensor_type]
    blocks = torch.empty(4096, 4096 // form.elements * form.num_bytes, dtype=torch.uint8)
    # Moved afterwards: without CUDA, torch cannot slice tensors on the pretended device.
    return repack(BlockMatrix(tensor_type, blocks)).to(DEVICE)


def counts(case: str, kernel: CompiledKernel) -> Iterator[dict[str, Any]]:
    """Yield a row for each loop that multiplies matrices; if there is none, one for the longest loop."""
    loops = [loop for loop in innermost_loops(kernel.instructions()) if len(loop) >= _LEAST]
    chosen = [loop for loop in loops if any(kind_of(each) == "matrix" for each in loop)]
    for loop in chosen or sorted(loops, key=len)[-1:]:
        weights = _weights(kernel)
        yield {
            "case": case,
            "kernel": kernel.name.rpartition(".")[2],
            "instructions": len(loop),
            "per_weight": None if weights is None else round(32 * kernel.num_warps * len(loop) / weights, 2),
            "warps": kernel.num_warps,
            **kernel.resource_usage(),
            "shared": kernel.shared,
            "kinds": dict(Counter(map(kind_of, loop))),
        }


def _weights(kernel: CompiledKernel) -> int | None:
    """Return how many weights an iteration takes; None: the kernel is not a product with a quantized matrix."""
    constants = kernel.constants
    if "block_c" not in constants or "block_n" not in constants:
        return None
    weights: int = constants["block_n"] * constants["block_c"] * CHUNK
    return weights


def as_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return the counts as a table."""
    table = Table(title=title, title_justify="left")
    kinds = [*_OPCODES, _INTEGER]
    table.add_column("case")
    for heading in ("all", "per weight", "warps", "registers", "spilled", "shared", *kinds):
        table.add_column(heading, justify="right")
    for row in rows:
        per_weight = "" if row["per_weight"] is None else f"{row['per_weight']:.2f}"
        usage = [str(row[key]) for key in ("warps", "registers", "stack", "shared")]
        found = [str(row["kinds"].get(kind, "")) for kind in kinds]
        table.add_row(row["case"], str(row["instructions"]), per_weight, *usage, *found)
    return table


def main(
    capability: Annotated[int, typer.Option(help="Of the GPU that is compiled for: 90 for 9.0")] = 90,
    only: Annotated[list[str] | None, typer.Option(help="Cases whose name has this in it; may be repeated")] = None,
    lines: Annotated[bool, typer.Option("--json", help="A JSON object for each loop instead of a table")] = False,
) -> None:
    """Compile the kernels and count."""
    if os.environ.get("TRITON_INTERPRET"):
        raise typer.BadParameter("with TRITON_INTERPRET set, Triton compiles nothing")
    rows: list[dict[str, Any]] = []
    with no_device(capability) as compiled:
        for case, call in (*attention_cases(), *linear_cases()):
            if only and not any(part in case for part in only):
                continue
            for kernel in compiled(call):
                rows += counts(case, kernel)
    if lines:
        for row in rows:
            print(json.dumps(row))
    else:
        Console(width=220).print(as_table(rows, f"instructions of a warp in a turn of a loop, sm_{capability}"))


if __name__ == "__main__":
    typer.run(main)

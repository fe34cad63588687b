"""Compare decode speed of checkpoints in 4-bit GPTQ and AWQ with Q4K, in turns.

python -m benchmarks.packed_decode --formats gptq,gptq-order,awq

The checkpoints have Qwen2.5-Coder-1.5B's shape, and its embeddings, tied to the output projection, in float16. Codes
are random, since speed does not depend on them.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import torch
import typer
from torch import Tensor

from benchmarks.inside import open_engine
from benchmarks.models import benchmark_model
from benchmarks.paths import cache_directory
from benchmarks.turns import decode_in_turns
from paged_sdk import IsqType, TextModelBuilder
from paged_sdk.system.processors import usable_processors

__all__ = ["packed_matrix", "write_packed"]

_GROUP: Final = 128
_ZEROS: Final = {"gptq": 0x77777777, "awq": -0x77777778}  # zero point 8 for each code; GPTQ files store one less


def packed_matrix(form: str, rows: int, cols: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors of a random matrix, by the suffixes of their names.

    :param form: ``gptq``, ``gptq-order`` (columns in an order of their own) or ``awq``
    """
    groups, words = cols // _GROUP, rows // 8
    shape = (cols, words) if form == "awq" else (cols // 8, rows)
    codes = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
    # Keeps products about as large as their inputs.
    scales = (torch.rand(groups, rows, generator=generator) + 0.5) / (4.6 * cols**0.5)
    tensors = {
        ".qweight": codes.int(),
        ".qzeros": torch.full((groups, words), _ZEROS[form.removesuffix("-order")], dtype=torch.int32),
        ".scales": scales.half(),
    }
    if form != "awq":
        order = torch.arange(cols)
        if form == "gptq-order":  # the same for all matrices with this input
            order = torch.randperm(cols, generator=torch.Generator().manual_seed(cols))
        tensors[".g_idx"] = (order // _GROUP).int()
    return tensors


def write_packed(form: str, dense: Path, target: Path) -> None:
    """Write a checkpoint with a dense one's config, tokenizer, norms, biases and embeddings, and random matrices."""
    from safetensors.torch import save_file

    from paged_sdk.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(dense)
    source, cpu = checkpoint.source, torch.device("cpu")
    generator, tensors = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name in source.names():
        values = source.tensor(name, torch.float16, cpu)
        if name.endswith("_proj.weight"):
            rows, cols = values.shape
            packed = packed_matrix(form, rows, cols, generator)
            tensors |= {name.removesuffix(".weight") + ending: each for ending, each in packed.items()}
        elif name != "lm_head.weight":
            tensors[name] = values.contiguous()
    settings: dict[str, Any] = {"bits": 4, "group_size": _GROUP}
    if form == "awq":
        settings |= {"quant_method": "awq", "zero_point": True, "version": "gemm"}
    else:
        settings |= {"quant_method": "gptq", "desc_act": form == "gptq-order", "sym": False}
    config = json.loads((dense / "config.json").read_text())
    config |= {"torch_dtype": "float16", "tie_word_embeddings": True, "quantization_config": settings}
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "tokenizer.json").write_bytes((dense / "tokenizer.json").read_bytes())
    (target / "config.json").write_text(json.dumps(config, indent=2))
    source.close()


def main(
    formats: Annotated[str, typer.Option(help="gptq, gptq-order, awq, with commas between them")] = "gptq,awq",
    output: Annotated[int, typer.Option(min=2, help="Generated tokens of each timed text")] = 24,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Print tokens per second of one stream."""
    num_threads = threads or usable_processors()
    torch.set_num_threads(num_threads)
    dense = benchmark_model("qwen1.5b-bf16").path_for(("directory",))
    assert dense is not None
    builders = {"Q4K": TextModelBuilder(dense).with_isq(IsqType.Q4K)}
    for form in formats.split(","):
        path = cache_directory("models") / f"random-qwen-1.5b-{form}"
        if not (path / "config.json").exists():
            write_packed(form, dense, path)
        builders[form] = TextModelBuilder(path)
    engines = {
        name: open_engine(builder.with_num_threads(num_threads).with_max_model_len(512))
        for name, builder in builders.items()
    }
    speeds = asyncio.run(decode_in_turns(engines, output=output, rounds=rounds))
    base = speeds["Q4K"]
    for name, found in speeds.items():
        ratio = median(one / other for one, other in zip(found, base, strict=True))
        print(f"{name}: best {max(found):.1f} tok/s, of Q4K {max(found) / max(base):.2f}, median of turns {ratio:.2f}")


if __name__ == "__main__":
    typer.run(main)

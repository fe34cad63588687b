"""Micro-benchmark of the native CPU kernels: `python benchmarks/kernels_cpu.py [--isa LEVEL] [--threads N]`.

Weights stream from memory, not from a cache: copies of each matrix are used in turn, 512 MB in all. Every line's figure
is the best of several alternating rounds, beside a plain read of the same bytes in the same round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from paged_sdk.kernels.gguf_blocks import BLOCK_FORMATS
from paged_sdk.kernels.native.library import NativeLibrary, Workspace, load, why_not
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.packed import PACKED_TYPES, PackedWeight, pack_gguf
from paged_sdk.kernels.native.paged_attention import AttentionShape, LayerCache, VarlenBatch, native_paged_attention

STREAMED_BYTES = 512 << 20
ROUNDS = 7
BLOCK_SIZE = 32


def best(run: Callable[[], object], calls: int = 1) -> float:
    """Seconds of the fastest of several bursts, per call."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def random_weight(library: NativeLibrary, tensor_type: int, rows: int, cols: int) -> PackedWeight:
    form = BLOCK_FORMATS[tensor_type]
    # Bytes below 60 make small positive float16 scales wherever they lie.
    raw = torch.randint(0, 60, (rows, cols // form.elements * form.num_bytes), dtype=torch.uint8)
    return pack_gguf(library, raw, tensor_type, rows, cols)


def multiply_next(layers: Iterator[NativeLinear], x: Tensor, out: Tensor) -> None:
    next(layers)(x, out=out)


def read_next(words: Iterator[Tensor]) -> None:
    """Add up a matrix as int64: the plain read that a kernel's time is held against."""
    next(words).sum()


def linear_table(workspace: Workspace, rows: int, cols: int, num_rows: Sequence[int]) -> None:
    print(f"linear {cols} -> {rows}: us, GB/s of weights (share of a plain read), TOP/s")
    for tensor_type in sorted(PACKED_TYPES):
        first = random_weight(workspace.library, tensor_type, rows, cols)
        count = STREAMED_BYTES // first.num_bytes
        copies = [PackedWeight(tensor_type, rows, cols, first.data.clone()) for _ in range(count)]
        layers = cycle([NativeLinear(workspace, [weight]) for weight in copies])
        words = cycle([weight.data[: weight.num_bytes // 8 * 8].view(torch.int64) for weight in copies])
        cells = []
        for m in num_rows:
            x, out = torch.randn(m, cols), torch.empty(m, rows)
            seconds = best(partial(multiply_next, layers, x, out), calls=8)
            read = best(partial(read_next, words), calls=8)
            rate, operations = first.num_bytes / seconds / 1e9, 2 * m * rows * cols / seconds / 1e12
            cells.append(f"{m:3}: {seconds * 1e6:7.0f} {rate:5.1f} ({read / seconds:4.2f}) {operations:4.2f}")
        print(f"  {first.format:5}" + " |".join(cells))


def small_table(workspace: Workspace, shapes: Sequence[tuple[int, int]], num_rows: Sequence[int]) -> None:
    print("small linears in Q4_1, in cache: us")
    for rows, cols in shapes:
        layer = NativeLinear(workspace, [random_weight(workspace.library, 3, rows, cols)])
        cells = []
        for m in num_rows:
            x, out = torch.randn(m, cols), torch.empty(m, rows)
            cells.append(f"{m:3}: {best(partial(layer, x, out=out), calls=200) * 1e6:6.1f}")
        print(f"  {cols:5} -> {rows:5}" + " |".join(cells))


def attention_table(workspace: Workspace, heads: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, head_size = heads
    print(f"paged attention, {num_heads} heads / {num_kv_heads} of {head_size}, bfloat16: us, GFLOP/s, GB/s of pages")
    shape = AttentionShape(num_heads, num_kv_heads, head_size, scale=head_size**-0.5)
    for sequences, tokens, context in ((1, 1, 256), (1, 1, 4000), (16, 1, 256), (1, 512, 512), (1, 512, 4000)):
        blocks = -(-context // BLOCK_SIZE)
        size = (sequences * blocks, BLOCK_SIZE, num_kv_heads, head_size)
        cache = LayerCache(torch.randn(size).bfloat16(), torch.randn(size).bfloat16())
        batch = VarlenBatch(
            torch.arange(sequences + 1, dtype=torch.int32) * tokens,
            torch.randperm(sequences * blocks).int().view(sequences, blocks),
            torch.full((sequences,), context, dtype=torch.int32),
        )
        query = torch.randn(sequences * tokens, num_heads, head_size)
        seconds = best(partial(native_paged_attention, workspace, query, cache, batch, shape), calls=3)
        operations = 4 * sequences * tokens * (context - tokens / 2) * num_heads * head_size
        read = 4 * sequences * context * num_kv_heads * head_size
        print(
            f"  {sequences:2} x {tokens:3} of {context:4}: {seconds * 1e6:8.0f} "
            f"{operations / seconds / 1e9:6.0f} {read / seconds / 1e9:6.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", help="an instruction-set level; the best by default")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    library = load(options.isa)
    if library is None:
        raise SystemExit(f"the native kernels are not available: {why_not()}")
    torch.set_num_threads(options.threads)
    workspace = Workspace(library, num_threads=options.threads)
    print(f"{library.isa}, {options.threads} threads")
    linear_table(workspace, 8960, 1536, (1, 4, 16, 32))
    small_table(workspace, ((576, 576), (1536, 576), (576, 1536)), (1, 4, 16))
    attention_table(workspace, (9, 3, 64))
    attention_table(workspace, (12, 2, 128))


if __name__ == "__main__":
    main()

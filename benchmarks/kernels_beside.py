"""Compare kernels of two builds of the native library in turns: `python -m benchmarks.kernels_beside OTHER`.

On a shared host, a kernel's time may double from one minute to the next, so two runs of `benchmarks.kernels_cpu` cannot
be compared. Here the builds take turns call by call, in one process, which gives their ratio to a few percent. OTHER is
the `libpaged_kernels.so` of a version with the same structures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import torch
import typer
from attrs import frozen
from torch import Tensor

from benchmarks.kernels_cpu import BLOCK_SIZE, attend_next, copies_of, multiply_next, paged_caches, random_weight
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kernels.attention_inputs import LayerCache, Precision
from paged_sdk.kernels.native.library import NativeLibrary, Workspace, load, open_library, why_not
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.packed import PACKED_TYPES
from paged_sdk.kernels.native.paged_attention import AttentionShape, VarlenBatch
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS

__all__ = ["Ratio", "attention_cells", "in_turns", "linear_cells"]

_SHAPE: Final = (2240, 1536)
_NUM_ROWS: Final = (1, 4, 8, 12, 16, 24, 64, 512)
_CONTEXTS: Final = ((1, 256), (1, 4000), (1, 16_000), (512, 4000))
_HEADS: Final = ((9, 3, 64), (12, 2, 128))
_LEAST_CALLS: Final = 8


@frozen
class Ratio:
    """Holds the result of calls in turns.

    :ivar times_as_fast: speed of the first build relative to the second: the median over pairs of calls
    :ivar seconds: median seconds per call of each build
    """

    times_as_fast: float
    seconds: tuple[float, float]

    def __str__(self) -> str:
        own, other = (f"{1e6 * each:.0f}" for each in self.seconds)
        return f"{self.times_as_fast:4.2f} ({own}, {other})"


def in_turns(own: Callable[[], object], other: Callable[[], object], seconds: float) -> Ratio:
    """Call both functions in turns for some seconds, alternating which one is first."""
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(times[0]) < _LEAST_CALLS or time.perf_counter() < end:
        for which in (0, 1) if len(times[0]) % 2 else (1, 0):
            start = time.perf_counter()
            (own, other)[which]()
            times[which].append(time.perf_counter() - start)
    return Ratio(median(b / a for a, b in zip(*times, strict=True)), (median(times[0]), median(times[1])))


def linear_cells(
    builds: tuple[Workspace, Workspace],
    tensor_type: int,
    num_rows: Sequence[int],
    seconds: float,
) -> Iterator[tuple[int, Ratio]]:
    """Compare products with weights of a block format, for each number of activation rows."""
    rows, cols = _SHAPE
    copies = copies_of(random_weight(builds[0].library, tensor_type, rows, cols))
    half = len(copies) // 2  # offset between the builds' copies, so that neither warms the other's cache
    for count in num_rows:
        x = torch.randn(count, cols)

        def product(workspace: Workspace, first: int, x: Tensor = x) -> Callable[[], None]:
            layers = cycle([NativeLinear(workspace, [weight]) for weight in copies[first:] + copies[:first]])
            out = torch.empty(len(x), rows)
            return lambda: multiply_next(layers, x, out)

        yield count, in_turns(product(builds[0], 0), product(builds[1], half), seconds)


def attention_cells(
    builds: tuple[Workspace, Workspace],
    heads: tuple[int, int, int],
    contexts: Sequence[tuple[int, int]],
    seconds: float,
) -> Iterator[tuple[int, int, Ratio]]:
    """Compare attention over bfloat16 pages.

    :param heads: number of query heads, number of KV heads, and head_dim
    :param contexts: pairs of a number of query tokens and the context's length, these included
    """
    num_heads, num_kv_heads, head_dim = heads
    shape = AttentionShape(*heads, scale=head_dim**-0.5, precision=Precision.INT8)
    for tokens, context in contexts:
        blocks = -(-context // BLOCK_SIZE)
        caches = paged_caches(builds[0], (blocks, BLOCK_SIZE, num_kv_heads, head_dim), PagedCacheType.AUTO, 2)
        batch = VarlenBatch(
            torch.tensor([0, tokens], dtype=torch.int32),
            torch.arange(blocks, dtype=torch.int32).view(1, blocks),
            torch.tensor([context], dtype=torch.int32),
        )
        query = torch.randn(tokens, num_heads, head_dim)

        def attention(
            workspace: Workspace, cache: LayerCache, query: Tensor = query, batch: VarlenBatch = batch
        ) -> Callable[[], None]:
            return lambda: attend_next(workspace, query, cycle([cache]), batch, shape)

        run = in_turns(attention(builds[0], caches[0]), attention(builds[1], caches[1]), seconds)
        yield tokens, context, run


def main(
    other: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The library of another build")],
    types: Annotated[str, typer.Option(help="Block formats by commas, none for no products")] = "Q4_1,Q4_K,Q6_K",
    rows: Annotated[str, typer.Option(help="Numbers of rows by commas")] = ",".join(map(str, _NUM_ROWS)),
    attention: Annotated[bool, typer.Option(help="Whether attention is compared, too")] = True,
    isa: Annotated[str | None, typer.Option(help="An instruction-set level; default: the best")] = None,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    seconds: Annotated[float, typer.Option(min=0, help="For each figure")] = 2.0,
) -> None:
    """Compare this build of the native library with another, call by call in turns: times as fast, and microseconds."""
    library = load(isa)
    if library is None:
        raise SystemExit(f"the native kernels are not available: {why_not()}")
    numbers = {BLOCK_FORMATS[number].name: number for number in PACKED_TYPES}
    names = [name for name in types.split(",") if name]
    if unknown := set(names) - set(numbers):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: expected some of {', '.join(numbers)}")
    torch.set_num_threads(threads)
    beside = NativeLibrary(open_library(other.resolve()), isa=library.isa, level=library.level)
    builds = Workspace(library, num_threads=threads), Workspace(beside, num_threads=threads)
    print(f"{library.isa}, threads: {threads}; times as fast as {other} (us, us of that)")
    for name in names:
        print(f"product with {_SHAPE[0]} x {_SHAPE[1]} weights in {name}")
        for count, ratio in linear_cells(builds, numbers[name], [int(each) for each in rows.split(",")], seconds):
            print(f"  {count:3} rows: {ratio}", flush=True)
    for heads in _HEADS if attention else ():
        print(f"attention with {heads[0]} heads / {heads[1]} of {heads[2]}")
        for tokens, context, ratio in attention_cells(builds, heads, _CONTEXTS, seconds):
            print(f"  {tokens} of {context} tokens: {ratio}", flush=True)


if __name__ == "__main__":
    typer.run(main)

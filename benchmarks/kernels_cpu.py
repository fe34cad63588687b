"""Time the native CPU kernels: `python benchmarks/kernels_cpu.py [PART ...] [--isa LEVEL] [--threads N]`.

Every figure is the best of several rounds, with a limit measured in the same run: a plain read of the same bytes for
linear layers, experts and quantizers; oneDNN's int8 product for linear layers of many rows; torch's matrix product for
attention. Weights are read from memory, not from a cache: copies of each matrix, 512 MB in total, are used in turn, and
every call has other experts.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kernels.attention_inputs import LayerCache, Precision
from paged_sdk.kernels.kv_cache import write_slots
from paged_sdk.kernels.native.experts import NativeExperts
from paged_sdk.kernels.native.huge_pages import HugePages
from paged_sdk.kernels.native.library import NativeLibrary, Workspace, load, why_not
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.packed import DENSE_TYPES, PACKED_TYPES, PackedWeight, pack_dense, pack_gguf
from paged_sdk.kernels.native.paged_attention import AttentionShape, VarlenBatch, native_paged_attention
from paged_sdk.kernels.native.quantize import quantize_blocks
from paged_sdk.kernels.own_pages import HUGE_PAGE
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS

STREAMED_BYTES = 512 << 20
ROUNDS = 7
BLOCK_SIZE = 32
PARTS = ("linear", "dense", "experts", "attention", "quantize")
PAGES = {PagedCacheType.AUTO: "bfloat16", PagedCacheType.F8E4M3: "f8e4m3", PagedCacheType.Q4: "4-bit"}
"""The types of pages over which attention is timed."""


def best(run: Callable[[], object], calls: int = 1) -> float:
    """Return the seconds per call of the fastest of several bursts."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def random_weight(library: NativeLibrary, tensor_type: int, rows: int, cols: int) -> PackedWeight:
    form = BLOCK_FORMATS[tensor_type]
    # Bytes below 60 make small positive float16 scales at any place.
    raw = torch.randint(0, 60, (rows, cols // form.elements * form.num_bytes), dtype=torch.uint8)
    return pack_gguf(library, raw, tensor_type, rows, cols)


def multiply_next(layers: Iterator[NativeLinear], x: Tensor, out: Tensor) -> None:
    next(layers)(x, out=out)


def copies_of(weight: PackedWeight) -> list[PackedWeight]:
    """Make enough copies to exceed any cache."""
    return [evolve(weight, data=weight.data.clone()) for _ in range(STREAMED_BYTES // weight.num_bytes)]


def read_next(words: Iterator[Tensor]) -> None:
    """Sum a matrix as int64: the plain read with which a kernel's time is compared."""
    next(words).sum()


def linear_table(workspace: Workspace, rows: int, cols: int, num_rows: Sequence[int]) -> None:
    print(f"linear {cols} -> {rows}: us, GB/s of weights (share of a plain read), TOP/s")
    for tensor_type in sorted(PACKED_TYPES):
        first = random_weight(workspace.library, tensor_type, rows, cols)
        copies = copies_of(first)
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


def rotated_table(workspace: Workspace, rows: int, cols: int, num_rows: Sequence[int]) -> None:
    first = random_weight(workspace.library, 12 if cols % 256 == 0 else 3, rows, cols)
    print(f"{first.format} for many rows {cols} -> {rows}: us, TOP/s | oneDNN's product of int8 rows, ready quantized")
    copies = copies_of(first.hadamard_form())
    layers = cycle([NativeLinear(workspace, [weight]) for weight in copies])
    codes = torch.randint(-127, 128, (rows, cols), dtype=torch.int8)
    scales, zeros = torch.rand(rows), torch.zeros(rows, dtype=torch.int64)
    prepacked = cycle([torch.ops.onednn.qlinear_prepack(codes, None) for _ in copies])

    def onednn(x: Tensor) -> None:
        weight = next(prepacked)
        torch.ops.onednn.qlinear_pointwise(
            x, 1.0, 128, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    for m in num_rows:
        x, out = torch.randn(m, cols), torch.empty(m, rows)
        quantized = torch.randint(0, 256, (m, cols), dtype=torch.uint8)
        times = [best(partial(multiply_next, layers, x, out), calls=4), best(partial(onednn, quantized), calls=4)]
        cells = [f"{seconds * 1e6:7.0f} {2 * m * rows * cols / seconds / 1e12:4.2f}" for seconds in times]
        print(f"  {m:3}: " + " |".join(cells))


def torch_product(matrices: Iterator[Tensor], x: Tensor) -> None:
    F.linear(x, next(matrices))


def dense_table(workspace: Workspace, rows: int, cols: int, num_rows: Sequence[int]) -> None:
    print(f"dense {cols} -> {rows}: us, GB/s of weights (share of a plain read), TFLOP/s | torch's own product")
    for dtype in DENSE_TYPES:
        count = STREAMED_BYTES // (rows * cols * dtype.itemsize)
        weights = [torch.randn(rows, cols).to(dtype) for _ in range(count)]
        packed = [pack_dense(workspace.library, [weight], (rows, cols), dtype) for weight in weights]
        layers, matrices = cycle([NativeLinear(workspace, [weight]) for weight in packed]), cycle(weights)
        words = cycle([weight.data.view(torch.int64) for weight in packed])
        read = best(partial(read_next, words), calls=8)
        for m in num_rows:
            x, out = torch.randn(m, cols), torch.empty(m, rows)
            own = x.to(dtype)
            seconds = best(partial(multiply_next, layers, x, out), calls=8 if m < 100 else 1)
            torch_seconds = best(partial(torch_product, matrices, own), calls=8 if m < 100 else 1)
            cells = [
                f"{took * 1e6:7.0f} {packed[0].num_bytes / took / 1e9:5.1f} ({read / took:4.2f})"
                f" {2 * m * rows * cols / took / 1e12:5.3f}"
                for took in (seconds, torch_seconds)
            ]
            print(f"  {packed[0].format:8} {m:3}: " + " | ".join(cells))


def small_table(workspace: Workspace, shapes: Sequence[tuple[int, int]], num_rows: Sequence[int]) -> None:
    print("small linears in Q4_1, in cache: us")
    for rows, cols in shapes:
        layer = NativeLinear(workspace, [random_weight(workspace.library, 3, rows, cols)])
        cells = []
        for m in num_rows:
            x, out = torch.randn(m, cols), torch.empty(m, rows)
            cells.append(f"{m:3}: {best(partial(layer, x, out=out), calls=200) * 1e6:6.1f}")
        print(f"  {cols:5} -> {rows:5}" + " |".join(cells))


def experts_table(workspace: Workspace, shape: tuple[int, int, int, int], num_tokens: Sequence[int]) -> None:
    num_experts, num_selected, inner, hidden = shape
    print(
        f"{num_selected} of {num_experts} experts, {hidden} -> {inner}: us, GB/s of those used (share of a plain read)"
    )
    bytes_read = torch.ones(STREAMED_BYTES // 8, dtype=torch.int64)
    read_rate = bytes_read.nbytes / best(bytes_read.sum)
    for gate_type, down_type in ((12, 12), (12, 14), (8, 8)):
        gate, up = (random_weight(workspace.library, gate_type, num_experts * inner, hidden) for _ in range(2))
        down = random_weight(workspace.library, down_type, num_experts * hidden, inner)
        experts = NativeExperts(workspace, gate, up, down, num_experts=num_experts)
        cells = []
        for tokens in num_tokens:
            choices = [
                torch.rand(tokens, num_experts).argsort(dim=-1)[:, :num_selected].contiguous() for _ in range(16)
            ]
            used = sum(len(set(ids.flatten().tolist())) for ids in choices) / len(choices)
            x, weights, ids = torch.randn(tokens, hidden), torch.rand(tokens, num_selected), cycle(choices)
            seconds = best(partial(multiply_experts, experts, x, weights, ids), calls=len(choices))
            rate = used / num_experts * experts.num_bytes / seconds
            cells.append(f"{tokens:3}: {seconds * 1e6:7.0f} {rate / 1e9:5.1f} ({rate / read_rate:4.2f})")
        print(f"  {gate.format} {down.format}" + " |".join(cells))


def multiply_experts(experts: NativeExperts, x: Tensor, weights: Tensor, ids: Iterator[Tensor]) -> None:
    experts(x, weights, next(ids))


def product_rate(dtype: torch.dtype) -> float:
    """Return the FLOP/s of torch's matrix product, with which attention's products are compared."""
    size = 1024
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / best(partial(F.linear, left, right))


def random_pages(size: tuple[int, int, int, int], cache_type: PagedCacheType) -> LayerCache:
    """Make pages of random keys and values, the same in every block."""
    num_blocks, block_size, num_kv_heads, head_dim = size
    settings = PoolSettings(
        block_size=block_size, dtype=torch.bfloat16, device=torch.device("cpu"), cache_type=cache_type
    )
    cache = settings.pages(0, num_blocks, num_kv_heads, head_dim)
    key, value = torch.randn(2, block_size, num_kv_heads, head_dim)
    write_slots(key, value, cache, torch.arange(block_size))
    for each in cache.tensors:
        each[1:] = each[:1]
    return cache


def paged_caches(
    workspace: Workspace, size: tuple[int, int, int, int], cache_type: PagedCacheType, count: int
) -> list[LayerCache]:
    """Make the pages of ``count`` layers, in huge pages as in an engine's full pool."""
    caches = [random_pages(size, cache_type) for _ in range(count)]
    seconds = itertools.count()  # a clock that advances enough for every call to make huge pages
    for cache in caches:
        pages = HugePages(workspace.library, [cache.key, cache.value], clock=lambda: float(next(seconds)))
        for _ in range(cache.key.nbytes // HUGE_PAGE):
            pages.follow(len(cache.key))
    return caches


def attend_next(
    workspace: Workspace, query: Tensor, caches: Iterator[LayerCache], batch: VarlenBatch, shape: AttentionShape
) -> None:
    native_paged_attention(workspace, query, next(caches), batch, shape)


def read_cache(caches: Iterator[LayerCache]) -> None:
    for each in next(caches).tensors:
        each.flatten().view(torch.int64).sum()


def attention_table(workspace: Workspace, heads: tuple[int, int, int], cache_type: PagedCacheType) -> None:
    num_heads, num_kv_heads, head_dim = heads
    limits = {Precision.FLOAT32: product_rate(torch.float32)}
    limits |= dict.fromkeys((Precision.BFLOAT16, Precision.INT8), product_rate(torch.bfloat16))
    print(
        f"paged attention, {num_heads} heads / {num_kv_heads} of {head_dim}, {PAGES[cache_type]} pages: us, GFLOP/s "
        f"(share of torch's product), GB/s of pages (share of a plain read); products of float32 | bfloat16 | int8"
    )
    for sequences, tokens, context in (
        (1, 1, 256),
        (1, 1, 4000),
        (1, 1, 16_000),
        (16, 1, 256),
        (1, 512, 512),
        (1, 512, 1000),
        (1, 512, 4000),
        (1, 512, 16_000),
    ):
        blocks = -(-context // BLOCK_SIZE)
        size = (sequences * blocks, BLOCK_SIZE, num_kv_heads, head_dim)
        read = sum(each.nbytes for each in random_pages((1, *size[1:]), cache_type).tensors) * sequences * blocks
        # A single token must read its pages from memory, as in a model of many layers.
        caches = paged_caches(workspace, size, cache_type, STREAMED_BYTES // read if tokens == 1 else 1)
        batch = VarlenBatch(
            torch.arange(sequences + 1, dtype=torch.int32) * tokens,
            torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks),
            torch.full((sequences,), context, dtype=torch.int32),
        )
        query = torch.randn(sequences * tokens, num_heads, head_dim)
        operations = 4 * sequences * tokens * (context - tokens / 2) * num_heads * head_dim
        plain = best(partial(read_cache, cycle(caches)), calls=8)
        cells = []
        for precision, limit in limits.items():
            shape = AttentionShape(num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5, precision=precision)
            run = partial(attend_next, workspace, query, cycle(caches), batch, shape)
            seconds = best(run, calls=8 if tokens == 1 else 1)
            rate = operations / seconds
            cells.append(
                f"{seconds * 1e6:8.0f} {rate / 1e9:6.0f} ({rate / limit:4.2f}) {read / seconds / 1e9:6.1f} "
                f"({plain / seconds:4.2f})"
            )
        print(f"  {sequences:2} x {tokens:3} of {context:6}: " + " |".join(cells))


def quantize_and_pack(library: NativeLibrary, weight: Tensor, tensor_type: int, *, num_threads: int) -> PackedWeight:
    blocks = quantize_blocks(library, weight, tensor_type, num_threads=num_threads)
    return pack_gguf(library, blocks, tensor_type, *weight.shape, num_threads=num_threads)


def quantize_table(workspace: Workspace, rows: int, cols: int) -> None:
    weight = torch.randn(rows, cols).bfloat16()
    read = best(partial(torch.sum, weight.view(torch.int64)))
    limit = weight.numel() / read / 1e6
    print(f"quantizers of bfloat16 weights: million weights/s, and packed (a plain read: {limit:.0f})")
    for tensor_type in sorted(PACKED_TYPES):
        rates = [
            weight.numel()
            / best(partial(run, workspace.library, weight, tensor_type, num_threads=workspace.num_threads))
            for run in (quantize_blocks, quantize_and_pack)
        ]
        print(f"  {BLOCK_FORMATS[tensor_type].name:5} {rates[0] / 1e6:6.0f} {rates[1] / 1e6:6.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all by default")
    parser.add_argument("--isa", help="an instruction-set level; the best by default")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}")
    library = load(options.isa)
    if library is None:
        raise SystemExit(f"the native kernels are not available: {why_not()}")
    torch.set_num_threads(options.threads)
    workspace = Workspace(library, num_threads=options.threads)
    print(f"{library.isa}, {options.threads} threads")
    parts = options.parts or PARTS
    if "linear" in parts:
        linear_table(workspace, 8960, 1536, (1, 4, 16, 32))
        rotated_table(workspace, 8960, 1536, (16, 64, 512))
        small_table(workspace, ((576, 576), (1536, 576), (576, 1536)), (1, 4, 16))
    if "dense" in parts:
        for rows, cols in ((8960, 1536), (1536, 8960), (576, 1536), (3072, 576)):
            dense_table(workspace, rows, cols, (1, 4, 16, 512))
    if "experts" in parts:
        experts_table(workspace, (128, 8, 768, 2048), (1, 4, 16, 64, 512))  # Qwen3-30B-A3B
    if "attention" in parts:
        for heads, cache_type in itertools.product(((9, 3, 64), (12, 2, 128)), PAGES):
            attention_table(workspace, heads, cache_type)
    if "quantize" in parts:
        quantize_table(workspace, 2048, 1536)


if __name__ == "__main__":
    main()

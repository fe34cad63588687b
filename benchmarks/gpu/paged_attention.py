"""Time paged attention on a CUDA device: `python -m benchmarks.gpu.paged_attention [--sweep]` prints a row per line.

Times are medians over replays of a CUDA graph, which exclude launches. Decode is compared with a device copy in the
same run, prefill with torch's attention over the same keys: contiguous, and gathered from the same pages.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.ahead import compile_side_by_side
from benchmarks.gpu.timing import Row, copy_bandwidth, microseconds
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kernels.attention_inputs import LayerCache, PagedRows, ScoreOptions
from paged_sdk.kernels.flash_prefill import PrefillRows, flash_prefill, why_not
from paged_sdk.kernels.prefill_choice import PagedPrefill, PrefillShape
from paged_sdk.kernels.triton.attention_tile import Tile
from paged_sdk.kernels.triton.kv_cache import reshape_and_cache
from paged_sdk.kernels.triton.paged_attention import paged_attention
from paged_sdk.kernels.triton.paged_batch import PagedBatch
from paged_sdk.kernels.triton.paged_decode import paged_decode_attention
from paged_sdk.kernels.triton.paged_prefill import paged_prefill_attention

__all__ = ["Batch", "Heads", "decode_row", "make_batch", "pages_decoded_first", "prefill_row", "run", "sweep"]

BLOCK_SIZE: Final = 32
# sequences, tokens of context each
DECODES: Final = ((64, 4096), (1, 65_536), (16, 1024), (256, 1024), (32, 8192))
# as DECODES, with a longer last sequence, in a step that is recorded for a still longer maximum
ONE_LONG: Final = (256, 1024)
LONG: Final = 9216
RECORDED: Final = 32_768
# tokens of a chunk, its context: whole prompts, and a chunk at the end of a long one
PREFILLS: Final = ((2048, 2048), (16_384, 16_384), (2048, 16_384))

DECODE_TILES: Final = tuple(
    Tile(16, block_n, warps, stages) for block_n, warps, stages in ((64, 4, 3), (64, 4, 4), (64, 2, 3), (128, 4, 3))
)
DECODE_SPLITS: Final = {(64, 4096): (1, 2, 3, 4, 8), (1, 65_536): (33, 50, 66, 99, 132, 198)}
PREFILL_TILES: Final = (
    Tile(128, 64, 8, 3),
    Tile(128, 64, 8, 4),
    Tile(128, 128, 8, 2),
    Tile(128, 128, 8, 3),
    Tile(64, 64, 4, 3),
    Tile(128, 64, 4, 3),
    Tile(64, 128, 4, 2),
)


@frozen(kw_only=True)
class Heads:
    """Describes the heads of a layer.

    :ivar key_only: above 0: latent vectors, keys that are the values, too, from this element on
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    key_only: int = 0

    @property
    def scale(self) -> float:
        """Return what multiplies the scores."""
        return 1 / math.sqrt(self.head_dim)


LLAMA: Final = Heads(num_heads=32, num_kv_heads=8, head_dim=128)


@frozen
class Batch:
    """Holds rows over a paged cache with blocks in random order.

    :ivar rows: ``num_rows`` rows of ``num_tokens`` query tokens each, over ``length`` keys
    :ivar more_keys: additional keys of the last row
    """

    heads: Heads
    query: Tensor
    cache: LayerCache
    rows: PagedRows
    num_rows: int
    num_tokens: int
    length: int
    more_keys: int = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes of keys, values and scales that attention reads."""
        per_token = sum(tensor[0, 0].nbytes for tensor in self.cache.tensors)
        return (self.num_rows * self.length + self.more_keys) * per_token

    @property
    def num_operations(self) -> int:
        """Return the multiplications and additions of causal attention, without those of the softmax."""
        pairs = sum(self.length - self.num_tokens + i + 1 for i in range(self.num_tokens))
        per_pair = 2 * (2 * self.heads.head_dim - self.heads.key_only) * self.heads.num_heads
        return self.num_rows * per_pair * pairs

    @property
    def inputs(self) -> tuple[Tensor, LayerCache, PagedRows, ScoreOptions]:
        """Return the inputs of attention."""
        return self.query, self.cache, self.rows, ScoreOptions(scale=self.heads.scale)


def make_batch(
    num_rows: int,
    num_tokens: int,
    length: int,
    device: torch.device,
    *,
    heads: Heads = LLAMA,
    quantized: bool = False,
    more_keys: int = 0,
    max_context_len: int | None = None,
) -> Batch:
    """Make a batch of random vectors.

    :param max_context_len: the maximum context length that the kernels are launched for; None: the longest row
    """
    blocks_of_row, more_blocks = -(-length // BLOCK_SIZE), -(-more_keys // BLOCK_SIZE)
    num_blocks = num_rows * blocks_of_row + more_blocks
    max_context_len = max_context_len or length + more_keys
    settings = PoolSettings(
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        device=device,
        cache_type=PagedCacheType.F8E4M3 if quantized else PagedCacheType.AUTO,
    )
    is_latent = heads.key_only > 0
    cache = settings.pages(
        0, num_blocks, heads.num_kv_heads, heads.head_dim, values_are_keys=is_latent, key_only=heads.key_only
    )
    vectors = (num_blocks * BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    key, value = (torch.randn(vectors, dtype=torch.bfloat16, device=device) for _ in range(2))
    slots = torch.arange(len(key), device=device)
    reshape_and_cache(key, value, cache.key, cache.value, slots, cache.k_scale, cache.v_scale)
    shape = (num_rows * num_tokens, heads.num_heads, heads.head_dim)
    query = torch.randn(shape, dtype=torch.bfloat16, device=device)
    blocks = torch.randperm(num_blocks, device=device).int()
    tables = torch.zeros(num_rows, -(-max_context_len // BLOCK_SIZE), dtype=torch.int32, device=device)
    tables[:, :blocks_of_row] = blocks[more_blocks:].view(num_rows, blocks_of_row)
    tables[-1, blocks_of_row : blocks_of_row + more_blocks] = blocks[:more_blocks]
    lengths = torch.full((num_rows,), length, dtype=torch.int32, device=device)
    lengths[-1] += more_keys
    ends = torch.arange(num_rows + 1, dtype=torch.int32, device=device) * num_tokens
    rows = PagedRows(
        block_tables=tables,
        context_lens=lengths,
        cu_seqlens_q=ends,
        max_seqlen_q=num_tokens,
        max_context_len=max_context_len,
    )
    return Batch(heads, query, cache, rows, num_rows, num_tokens, length, more_keys)


def prefill_references(batch: Batch, device: torch.device) -> dict[str, float]:
    """Return the microseconds of torch's attention."""
    times = torch_times(batch, device) if batch.num_tokens == batch.length else {}
    if why_not(torch.bfloat16, batch.heads.head_dim, device) is None:
        times["torch flash over pages"] = microseconds(flash_over_pages(batch, device))
    return times


def flash_over_pages(batch: Batch, device: torch.device) -> Callable[[], Tensor]:
    """Return a call of torch's FlashAttention as in an engine; for a chunk of a prompt, this includes gathering the
    keys.
    """
    shape = (len(batch.query), batch.heads.num_kv_heads, batch.heads.head_dim)
    key, value = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    return partial(flash_prefill, batch.query, key, value, batch.cache, prefill_rows(batch), scale=batch.heads.scale)


def pages_decoded_first(batch: Batch, device: torch.device) -> Callable[[], Tensor]:
    """Return a call of the Triton kernels as in an engine, for a long chunk of a prompt over an f8e4m3 cache."""
    shape = PrefillShape(
        num_heads=batch.heads.num_heads,
        num_kv_heads=batch.heads.num_kv_heads,
        head_dim=batch.heads.head_dim,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        device=device,
        scale=batch.heads.scale,
        quantized=True,
        values_are_keys=batch.cache.values_are_keys,
    )
    prefill = PagedPrefill(shape=shape, paged=paged_attention, flash=None, reason="it is measured")
    nothing = batch.query.new_empty(0)  # all keys are in the cache
    return partial(prefill, batch.query, nothing, nothing, batch.cache, prefill_rows(batch))


def prefill_rows(batch: Batch) -> PrefillRows:
    """Return the description of a batch's rows, as in an engine."""
    return PrefillRows(
        batch.rows,
        block_size=BLOCK_SIZE,
        num_tokens=len(batch.query),
        total_context_len=batch.num_rows * batch.length,
        begin_sequences=batch.num_tokens == batch.length,
    )


def torch_times(batch: Batch, device: torch.device) -> dict[str, float]:
    """Return the microseconds of torch's attention over contiguous keys of whole prompts, by backend that supports the
    shape.
    """
    shape = (batch.num_rows, batch.heads.num_heads, batch.length, batch.heads.head_dim)
    query = torch.randn((*shape[:2], batch.num_tokens, shape[3]), dtype=torch.bfloat16, device=device)
    key, value = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    times = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                times[f"torch {backend.name.lower()}"] = microseconds(
                    lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=batch.heads.scale)
                )
        except RuntimeError:  # the backend does not support the shape
            continue
    return times


def _decodes(device: torch.device, *, quantized: bool) -> dict[str, Callable[[], Batch]]:
    """Return functions that make the decode batches, by name."""
    make = partial(make_batch, device=device, quantized=quantized)
    num_rows, length = ONE_LONG
    return {
        **{f"{rows} x {keys}": partial(make, rows, 1, keys) for rows, keys in DECODES},
        f"{num_rows} x {length}, one of {LONG}": partial(
            make, num_rows, 1, length, more_keys=LONG - length, max_context_len=RECORDED
        ),
    }


def _calls(device: torch.device) -> Iterator[Callable[[], object]]:
    """Yield calls that together launch every timed kernel."""

    def attend(make: Callable[[], Batch]) -> Tensor:
        return paged_attention(*make().inputs)

    def decode_first(num_tokens: int, length: int) -> Tensor:
        return pages_decoded_first(make_batch(1, num_tokens, length, device, quantized=True), device)()

    for quantized in (False, True):
        for make in _decodes(device, quantized=quantized).values():
            yield partial(attend, make)
        for num_tokens, length in PREFILLS:
            yield partial(attend, partial(make_batch, 1, num_tokens, length, device, quantized=quantized))
    for num_tokens, length in PREFILLS:
        yield partial(decode_first, num_tokens, length)


def run(device: torch.device) -> Iterator[Row]:
    """Compile all kernels, then time them as an engine calls them, with limits measured in the same run."""
    compile_side_by_side(_calls(device))
    copy = copy_bandwidth(device)
    in_bf16: dict[str, float] = {}
    for quantized in (False, True):
        cache = "f8e4m3" if quantized else "bf16"
        for case, made in _decodes(device, quantized=quantized).items():
            batch = made()
            us = microseconds(partial(paged_attention, *batch.inputs))
            row = decode_row(batch, f"{case}, {cache}", us, copy)
            if quantized:
                row["reference"]["of_bf16_us"] = round(us / in_bf16[case], 3)
            in_bf16.setdefault(case, us)
            yield row
    for num_tokens, length in PREFILLS:
        batch = make_batch(1, num_tokens, length, device)
        us = microseconds(partial(paged_attention, *batch.inputs))
        case = f"1 x {length}, bf16" if num_tokens == length else f"1 x {num_tokens} of {length}, bf16"
        yield prefill_row(batch, case, us, prefill_references(batch, device))
        batch = make_batch(1, num_tokens, length, device, quantized=True)
        us = microseconds(pages_decoded_first(batch, device))
        as_they_are = microseconds(partial(paged_attention, *batch.inputs))
        yield prefill_row(batch, case.replace("bf16", "f8e4m3"), us, {"pages as they are": as_they_are})


def sweep(device: torch.device) -> Iterator[Row]:
    """Time all tiles and splits, to choose the defaults."""
    copy = copy_bandwidth(device)
    for (num_rows, length), splits in DECODE_SPLITS.items():
        batch = make_batch(num_rows, 1, length, device)
        for tile in DECODE_TILES:
            for num_splits in splits:
                decode = partial(paged_decode_attention, max_seqlen_q=1, max_context_len=length)
                us = microseconds(partial(decode, PagedBatch(*batch.inputs), tile=tile, num_splits=num_splits))
                yield decode_row(batch, f"{num_rows} x {length}, {num_splits} splits, {tile}", us, copy)
    for num_tokens, length in PREFILLS:
        batch = make_batch(1, num_tokens, length, device)
        for tile in PREFILL_TILES:
            us = microseconds(partial(paged_prefill_attention, PagedBatch(*batch.inputs), tile=tile))
            yield prefill_row(batch, f"1 x {num_tokens} of {length}, {tile}", us, {})


def decode_row(batch: Batch, case: str, us: float, copy: float) -> Row:
    gbps = batch.num_bytes / us / 1000
    reference = {"copy_gbps": round(copy), "of_copy": round(gbps / copy, 3)}
    return {"kernel": "paged decode", "case": case, "us": round(us, 1), "gbps": round(gbps), "reference": reference}


def prefill_row(batch: Batch, case: str, us: float, others: dict[str, float]) -> Row:
    reference = {name: round(batch.num_operations / time / 1e6, 1) for name, time in others.items()}
    tflops = round(batch.num_operations / us / 1e6, 1)
    return {"kernel": "paged prefill", "case": case, "us": round(us, 1), "tflops": tflops, "reference": reference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="tiles and splits beside each other")
    device = torch.device("cuda")
    for row in sweep(device) if parser.parse_args().sweep else run(device):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

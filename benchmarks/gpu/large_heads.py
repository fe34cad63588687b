"""Time paged attention over latent vectors and heads of 512 elements on a CUDA device: `python -m
benchmarks.gpu.large_heads` prints a row per line.

Decode is compared with a device copy and with torch's operations over gathered keys, which served such layers before
the Triton kernels did; of an f8e4m3 cache, prefill that decodes pages first with prefill over the pages as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from benchmarks.gpu.ahead import compile_side_by_side
from benchmarks.gpu.paged_attention import (
    BLOCK_SIZE,
    Batch,
    Heads,
    decode_row,
    make_batch,
    pages_decoded_first,
    prefill_row,
)
from benchmarks.gpu.timing import Row, copy_bandwidth, microseconds
from paged_sdk.kernels.attention_inputs import ScoreOptions
from paged_sdk.kernels.paged_attention import paged_decode_attention
from paged_sdk.kernels.triton.paged_attention import paged_attention

__all__ = ["run"]

HEADS: Final[Mapping[str, Heads]] = MappingProxyType(
    {
        "latent vectors, 128 heads": Heads(num_heads=128, num_kv_heads=1, head_dim=576, key_only=64),
        "latent vectors, 16 heads": Heads(num_heads=16, num_kv_heads=1, head_dim=576, key_only=64),
        "32 and 4 heads of 512": Heads(num_heads=32, num_kv_heads=4, head_dim=512),
    }
)
# sequences, tokens of context each
DECODES: Final = ((64, 4096), (1, 65_536))
# tokens of a chunk, its context
PREFILL: Final = (2048, 16_384)


def by_torch(batch: Batch) -> Callable[[], Tensor]:
    """Return a call of torch's operations for decodes of equal length, as an engine without other kernels makes it."""
    position = torch.arange(batch.length, device=batch.query.device)
    slots = batch.rows.block_tables[:, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
    scores = ScoreOptions(scale=batch.heads.scale)
    return partial(paged_decode_attention, batch.query, batch.cache, slots, None, scores)


def _calls(device: torch.device) -> Iterator[Callable[[], object]]:
    """Yield calls that together launch every timed kernel."""

    def attend(make: Callable[[], Batch]) -> Tensor:
        return paged_attention(*make().inputs)

    def decode_first(make: Callable[[], Batch]) -> Tensor:
        return pages_decoded_first(make(), device)()

    for heads, quantized in product(HEADS.values(), (False, True)):
        make = partial(make_batch, device=device, heads=heads, quantized=quantized)
        for num_rows, length in DECODES:
            yield partial(attend, partial(make, num_rows, 1, length))
        yield partial(attend, partial(make, 1, *PREFILL))
        if quantized:
            yield partial(decode_first, partial(make, 1, *PREFILL))


def run(device: torch.device) -> Iterator[Row]:
    """Compile all kernels, then time them as an engine calls them, with limits measured in the same run."""
    compile_side_by_side(_calls(device))
    copy = copy_bandwidth(device)
    for (name, heads), quantized in product(HEADS.items(), (False, True)):
        cache = "f8e4m3" if quantized else "bf16"
        for num_rows, length in DECODES:
            batch = make_batch(num_rows, 1, length, device, heads=heads, quantized=quantized)
            us = microseconds(partial(paged_attention, *batch.inputs))
            row = decode_row(batch, f"{num_rows} x {length}, {name}, {cache}", us, copy)
            row["reference"]["torch_us"] = round(microseconds(by_torch(batch)), 1)
            yield row
        batch = make_batch(1, *PREFILL, device, heads=heads, quantized=quantized)
        case = f"1 x {PREFILL[0]} of {PREFILL[1]}, {name}, {cache}"
        as_they_are = microseconds(partial(paged_attention, *batch.inputs))
        if quantized:
            us = microseconds(pages_decoded_first(batch, device))
            yield prefill_row(batch, case, us, {"pages as they are": as_they_are})
        else:
            yield prefill_row(batch, case, as_they_are, {})


def main() -> None:
    for row in run(torch.device("cuda")):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

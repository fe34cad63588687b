"""Holds the tile sizes of paged attention by device, head size and kind of cache.

Choices follow from compiled code: the largest tiles that leave the compiler enough registers, and that fit in shared
memory. Compute capability 8.6, 8.9 and 12 have only 99 KB of it, 8.0 has 163, 9.0 and 10.0 have 227.
"""

from __future__ import annotations

from typing import Final

import torch
import triton

from paged_sdk.kernels.triton.attention_tile import Tile
from paged_sdk.kernels.triton.paged_batch import PagedBatch
from paged_sdk.kernels.triton.tile_choices import MatrixUnits, matrix_units

__all__ = ["LARGEST_DECODE_TILE", "LARGE_HEAD", "decode_tile", "prefill_tile"]

LARGEST_DECODE_TILE: Final = 64
"""The most query rows of a tile of decodes."""

LARGE_HEAD: Final = 256
"""Values with more elements have tiles of their own: 64 query rows of 512 take half of a multiprocessor's registers."""


def decode_tile(batch: PagedBatch, num_rows: int) -> Tile:
    """Return the tile for ``num_rows`` query rows (tokens times heads of a group) per batch row and KV head."""
    query = batch.query
    if query.dtype == torch.float32:  # no tensor cores: their TF32 is not float32
        return Tile(block_m=16, block_n=16, num_warps=4, num_stages=2)
    block_m = max(16, triton.next_power_of_2(num_rows))
    if batch.value_dim > LARGE_HEAD:
        return _large_decode_tile(batch, block_m)
    if batch.value_dim > 128:
        return Tile(block_m=min(block_m, 32), block_n=32, num_warps=4, num_stages=3)
    return Tile(block_m=min(block_m, LARGEST_DECODE_TILE), block_n=64, num_warps=4, num_stages=3)


def _large_decode_tile(batch: PagedBatch, block_m: int) -> Tile:
    """Return the tile for heads of up to 512 elements, with or without more elements of keys only.

    Four warps divide 32 keys among them; with eight, each product of a query and a key would be computed twice. On
    10.0, 64 rows of latent vectors with two tiles in flight would take 245 KB of shared memory.
    """
    wide, quantized = _is_wide(batch), batch.cache.quantized
    two_caches = not batch.cache.values_are_keys and not quantized
    if block_m == 16 or batch.cache.key_offsets is not None:
        # In bfloat16, keys and values of 32 tokens take 64 KB, of which two are in flight.
        return Tile(block_m=16, block_n=16 if two_caches and not wide else 32, num_warps=4, num_stages=3)
    if block_m == 32 or quantized or two_caches or not wide:
        return Tile(block_m=32, block_n=16 if two_caches else 32, num_warps=8, num_stages=3 if wide else 2)
    return Tile(block_m=64, block_n=32, num_warps=8, num_stages=3 if _units(batch) is MatrixUnits.SHARED_MEMORY else 2)


def prefill_tile(batch: PagedBatch) -> Tile:
    """Return the tile for rows of many query tokens.

    Hopper's matrix instructions, 64 rows per four warps, read keys and values from shared memory. Before Hopper, keys
    and values go through registers.
    """
    value_dim, quantized, wide = batch.value_dim, batch.cache.quantized, _is_wide(batch)
    if batch.query.dtype == torch.float32:  # as for decodes
        return Tile(block_m=16, block_n=16, num_warps=4, num_stages=2)
    if value_dim > LARGE_HEAD:
        return _large_prefill_tile(batch)
    if quantized:
        # Four warps with 64 keys take fewer instructions than eight: with fewer keys than half the threads, every warp
        # loads the scales again, and before Hopper every warp decodes all keys. With key offsets, 64 queries of more
        # than 128 elements spill kilobytes of registers before Hopper.
        if value_dim > 128:
            has_offsets = batch.cache.key_offsets is not None
            return Tile(block_m=64 if wide or not has_offsets else 32, block_n=32, num_warps=8, num_stages=2)
        # Loads of less than 16 bytes need more addresses: with 100 elements, registers would spill 216 bytes on 8.0.
        narrow = value_dim > 64 and value_dim % 16 != 0 and not wide
        return Tile(block_m=64, block_n=32 if narrow else 64, num_warps=4, num_stages=3 if wide else 2)
    if wide:
        if value_dim <= 64:  # with 36 elements, for the same reason, registers would spill 264 bytes on 10.0
            return Tile(block_m=128, block_n=128 if value_dim % 16 == 0 else 64, num_warps=8, num_stages=3)
        if value_dim <= 128:
            return Tile(block_m=128, block_n=64, num_warps=8, num_stages=3)
        return Tile(block_m=128, block_n=32, num_warps=8, num_stages=3)
    if value_dim <= 64:
        return Tile(block_m=128, block_n=64, num_warps=8, num_stages=3)
    if value_dim <= 128:
        return Tile(block_m=128, block_n=32, num_warps=8, num_stages=3)
    return Tile(block_m=64, block_n=32, num_warps=8, num_stages=2)


def _large_prefill_tile(batch: PagedBatch) -> Tile:
    """Return the tile for heads of up to 512 elements, with or without more elements of keys only."""
    if batch.cache.key_offsets is not None:  # 32 rows would spill 790 bytes on 12.0, and 32 keys 136 on 8.0
        return Tile(block_m=16, block_n=16, num_warps=4, num_stages=2)
    if batch.cache.quantized:  # decoded keys take registers: on 9.0, 64 rows would spill 880 bytes
        return Tile(block_m=32, block_n=32, num_warps=8, num_stages=2)
    if not _is_wide(batch):
        return Tile(block_m=64, block_n=16, num_warps=8, num_stages=2)
    if batch.cache.values_are_keys:
        return Tile(block_m=64, block_n=32, num_warps=8, num_stages=2)
    return Tile(block_m=64, block_n=16, num_warps=8, num_stages=3 if _units(batch) is MatrixUnits.SHARED_MEMORY else 2)


def _units(batch: PagedBatch) -> MatrixUnits:
    return matrix_units(batch.query.device, batch.query.dtype)


def _is_wide(batch: PagedBatch) -> bool:
    """Return whether matrix instructions of 64 rows read shared memory, of which there is more then."""
    return _units(batch) in (MatrixUnits.SHARED_MEMORY, MatrixUnits.TENSOR_MEMORY)

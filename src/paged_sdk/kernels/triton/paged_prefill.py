"""Computes attention of many query tokens: whole prompts, prompt chunks, and batches of them of any lengths.

One program processes one tile of queries over all keys that they see ("FlashAttention-2", Dao, 2023). Tiles of keys
before the window and after the diagonal are skipped. Only tiles crossed by the window's edge or the diagonal are
masked.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paged_sdk.kernels.triton.attention_tile import (
    HeadPages,
    Queries,
    RunningSoftmax,
    Scoring,
    Tile,
    attend,
    joined,
    load_query,
    no_sums,
    normalize,
)
from paged_sdk.kernels.triton.attention_tile_choices import prefill_tile
from paged_sdk.kernels.triton.paged_batch import PagedBatch

__all__ = ["paged_prefill_attention"]


def paged_prefill_attention(
    batch: PagedBatch,
    *,
    out: Tensor | None = None,
    min_seqlen_q: int = 1,
    tile: Tile | None = None,
) -> Tensor:
    """Attend with one program per tile of queries.

    :param out: ``[num_tokens, num_heads, head_dim]``, written and returned; None: a new tensor
    :param min_seqlen_q: rows with fewer query tokens are skipped: their part of ``out`` is not written
    :param tile: None: that of :func:`prefill_tile`
    """
    query, num_rows = batch.query, batch.num_rows
    num_tokens = len(query)
    output = query.new_empty(query.shape) if out is None else out
    if num_rows == 0 or query.numel() == 0:
        return output

    tile = tile or prefill_tile(batch)
    # Only the device knows the number of tiles of each row; this is an upper bound of their sum.
    num_tiles = num_tokens * batch.group // tile.block_m + num_rows
    _attend_tile[(num_tiles, batch.num_kv_heads)](
        **batch.arguments(output),
        num_rows=num_rows,
        min_seqlen_q=min_seqlen_q,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return output


@triton.jit
def _find_row(
    tile: tl.tensor, cu_seqlens_q: tl.tensor, num_rows: tl.tensor, group: tl.constexpr, block_m: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Find the row that a tile belongs to, and the row's first tile, by bisection.

    Row r begins at tile ``cu_seqlens_q[r] * group // block_m + r``, which gives each row at least the tiles it needs.
    """
    row = tl.full((), 0, tl.int32)
    end = num_rows
    while end - row > 1:
        middle = (row + end) // 2
        before = tl.load(cu_seqlens_q + middle) * group // block_m + middle <= tile
        row = tl.where(before, middle, row)
        end = tl.where(before, end, middle)
    return row, tl.load(cu_seqlens_q + row) * group // block_m + row


@triton.jit(do_not_specialize=("table_stride", "num_rows", "min_seqlen_q"))
def _attend_tile(
    output: tl.tensor,
    output_token_stride: tl.tensor,
    output_head_stride: tl.tensor,
    query: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    key_offsets: tl.tensor,
    offset_stride: tl.tensor,
    block_tables: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.constexpr,
    slot_stride: tl.constexpr,
    head_stride: tl.constexpr,
    scale_block_stride: tl.constexpr,
    scale_slot_stride: tl.constexpr,
    scale_head_stride: tl.constexpr,
    context_lens: tl.tensor,
    cu_seqlens_q: tl.tensor,
    num_rows: tl.tensor,
    min_seqlen_q: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    alibi_slopes: tl.tensor,
    sinks: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    key_only: tl.constexpr,
    padded_size: tl.constexpr,
    padded_key_only: tl.constexpr,
    block_size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    decoder: tl.constexpr,
    upcast: tl.constexpr,
) -> None:
    """Attend with one tile of queries of one KV head; neighboring programs share its keys in the L2 cache."""
    # The last tiles of a row see the most keys. They start first, so that the short ones come last.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row, row_tile = _find_row(tile, cu_seqlens_q, num_rows, group, block_m)
    first_token = tl.load(cu_seqlens_q + row)
    num_tokens = tl.load(cu_seqlens_q + row + 1) - first_token
    first_row = (tile - row_tile) * block_m
    if (first_row >= num_tokens * group) | (num_tokens < min_seqlen_q):
        return
    context_len = tl.load(context_lens + row)

    tile_row = first_row + tl.arange(0, block_m)
    token = tile_row // group
    head = kv_head * group + tile_row % group
    valid = token < num_tokens
    offset = context_len - num_tokens
    query_position = offset + token
    first_position = offset + first_row // group
    # For a tile of padding only, end would be negative: no page may be read.
    end = tl.maximum(offset + tl.minimum((first_row + block_m - 1) // group, num_tokens - 1) + 1, 0)
    slope = None
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + head, mask=valid, other=0.0)

    rows, factor = load_query(
        query,
        query_token_stride,
        query_head_stride,
        (first_token + token).to(tl.int64),
        head,
        valid,
        head_dim,
        key_only,
        padded_size,
        padded_key_only,
        decoder,
        upcast,
    )
    # Keys begin .. whole - 1 cross the window's edge, keys whole .. diagonal - 1 are seen by all queries of the tile,
    # and keys diagonal .. end - 1 cross the diagonal.
    first_key = 0 if window is None else tl.maximum(first_position + 1 - window, 0)
    begin = first_key // block_n * block_n
    whole = 0 if window is None else tl.minimum(tl.cdiv(tl.maximum(end - window, 0), block_n) * block_n, end)
    diagonal = tl.maximum((tl.maximum(first_position, -1) + 1) // block_n * block_n, whole)
    bounds = (begin, whole, diagonal, end)

    peak = tl.full((block_m,), float("-inf"), tl.float32)
    running = RunningSoftmax(no_sums(block_m, padded_size, decoder), peak, tl.zeros((block_m,), tl.float32))
    for part in tl.static_range(3):
        if part != 0 or window is not None:
            running = attend(
                running,
                Queries(rows, factor, query_position, slope),
                HeadPages(
                    key_cache + kv_head.to(tl.int64) * head_stride,
                    None if value_cache is None else value_cache + kv_head.to(tl.int64) * head_stride,
                    None if k_scale is None else k_scale + kv_head * scale_head_stride,
                    None if v_scale is None else v_scale + kv_head * scale_head_stride,
                    None if key_offsets is None else key_offsets + kv_head * head_dim,
                    offset_stride,
                    block_tables + row.to(tl.int64) * table_stride,
                    block_stride,
                    slot_stride,
                    scale_block_stride,
                    scale_slot_stride,
                    block_size,
                    head_dim,
                    key_only,
                    decoder,
                ),
                Scoring(scale, softcap, window),
                bounds[part],
                bounds[part + 1],
                first_key,
                block_n,
                part != 1,
            )

    dim = tl.arange(0, padded_size)
    result = normalize(joined(running.sums), running.peak, running.total, sinks, head, valid)
    if padded_size > 256:
        # Which rows these are is computed again. To keep it since the query was loaded takes a register or two for each
        # row of a thread, of which none are left: with groups of 20 heads, 248 bytes would spill on 9.0. A volatile
        # load keeps the compiler from seeing that it is the same.
        first_token = tl.load(cu_seqlens_q + row, volatile=True)
        tile_row = (tile - row - first_token * group // block_m) * block_m + tl.arange(0, block_m)
        token = tile_row // group
        head = kv_head * group + tile_row % group
        valid = token < num_tokens
    place = (first_token + token).to(tl.int64) * output_token_stride + head * output_head_stride + key_only
    mask = valid[:, None] & (dim < head_dim - key_only)[None, :]
    tl.store(output + place[:, None] + dim[None, :], result, mask=mask)

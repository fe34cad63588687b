"""Computes attention of a few query tokens per sequence over long contexts, splitting keys among programs.

One query row over a long context would leave most of a device idle, so each sequence's keys are divided into splits,
which programs process in parallel; a second kernel joins their results ("Flash-Decoding", Dao, Haziza, Massa and Sizov,
2023). The query heads of a KV head are rows of one tile, so keys and values are read once for all of them. The kernel
is bound by these reads.
"""

from __future__ import annotations

from typing import Final

import torch
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
from paged_sdk.kernels.triton.attention_tile_choices import decode_tile
from paged_sdk.kernels.triton.availability import num_multiprocessors
from paged_sdk.kernels.triton.paged_batch import PagedBatch
from paged_sdk.kernels.triton.split_plan import (
    MOST_PARTIAL_BYTES,
    SplitPlan,
    bytes_of_result,
    plan_splits,
    programs_that_fill,
)

__all__ = ["paged_decode_attention"]

# Floats of partial results that a program of the second kernel holds at once.
_JOINED_AT_ONCE: Final = 8192


def paged_decode_attention(
    batch: PagedBatch,
    *,
    max_seqlen_q: int,
    max_context_len: int,
    out: Tensor | None = None,
    num_splits: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Attend with the keys of each row split among programs.

    :param max_seqlen_q: rows with more query tokens are skipped: their part of ``out`` is not written
    :param max_context_len: upper bound of the context lengths
    :param out: ``[num_tokens, num_heads, head_dim]``, written and returned; None: a new tensor
    :param num_splits: divide every row into this number of splits; None: as many as fill the device
    :param tile: None: that of :func:`decode_tile`
    """
    query, num_rows, num_kv_heads, window = batch.query, batch.num_rows, batch.num_kv_heads, batch.scores.window
    num_tokens, num_heads, _ = query.shape
    output = query.new_empty(query.shape) if out is None else out
    if num_rows == 0 or query.numel() == 0:
        return output

    tile_rows = max_seqlen_q * batch.group
    tile = tile or decode_tile(batch, tile_rows)
    num_tiles = triton.cdiv(tile_rows, tile.block_m)
    # block_n more: the first key of a window may be the last of its tile.
    visible = max_context_len if window is None else window + max_seqlen_q + tile.block_n
    num_keys = min(max_context_len, visible)
    # Partial results are indexed by token of the batch if that takes less memory than max_seqlen_q places per row:
    # among hundreds of rows with one token, one may have several.
    by_row = num_rows * max_seqlen_q <= num_tokens
    num_places = num_rows * max_seqlen_q if by_row else num_tokens
    if num_splits is None:
        programs = num_rows * num_kv_heads * num_tiles
        most = max(1, MOST_PARTIAL_BYTES // (num_places * num_heads * bytes_of_result(batch.value_dim)))
        wanted = programs_that_fill(num_multiprocessors(query.device), batch.value_dim)
        plan = plan_splits(programs, num_keys, tile.block_n, wanted, most)
    else:
        longest = triton.cdiv(max(1, num_keys), tile.block_n) * tile.block_n
        plan = SplitPlan(num_splits=num_splits, parts=num_splits, shortest=tile.block_n, longest=longest)

    partial = partial_lse = None
    if plan.num_splits > 1:
        size = (num_places, num_heads, plan.num_splits)
        partial = query.new_empty((*size, batch.value_dim), dtype=torch.float32)
        partial_lse = query.new_empty(size, dtype=torch.float32)
    splits = {"parts": plan.parts, "shortest": plan.shortest, "longest": plan.longest, "num_splits": plan.num_splits}
    _attend_split[(num_kv_heads * num_tiles, plan.num_splits, num_rows)](
        **batch.arguments(output),
        **splits,
        partial=partial,
        partial_lse=partial_lse,
        places_of_row=max_seqlen_q if by_row else 0,
        max_seqlen_q=max_seqlen_q,
        num_tiles=num_tiles,
        num_heads=num_heads,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if plan.num_splits > 1:
        _join_splits[(num_heads, max_seqlen_q, num_rows)](
            output=output,
            output_token_stride=output.stride(0),
            output_head_stride=output.stride(1),
            partial=partial,
            partial_lse=partial_lse,
            context_lens=batch.rows.context_lens,
            cu_seqlens_q=batch.rows.cu_seqlens_q,
            places_of_row=max_seqlen_q if by_row else 0,
            max_seqlen_q=max_seqlen_q,
            window=window,
            **splits,
            sinks=batch.scores.sinks,
            num_heads=num_heads,
            key_only=batch.cache.key_only,
            value_dim=batch.value_dim,
            padded_size=batch.padded_size,
            block_n=tile.block_n,
            block_splits=max(1, _JOINED_AT_ONCE // batch.padded_size),
            num_warps=4,
        )
    return output


@triton.jit
def _keys_of_row(
    context_len: tl.tensor, num_tokens: tl.tensor, window: tl.tensor, block_n: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first key that any token of a row sees, and the same rounded down to a tile boundary."""
    first_key = 0 if window is None else tl.maximum(context_len - num_tokens + 1 - window, 0)
    return first_key, first_key // block_n * block_n


@triton.jit
def _split_length(
    num_keys: tl.tensor, parts: tl.tensor, shortest: tl.tensor, longest: tl.tensor, block_n: tl.constexpr
) -> tl.tensor:
    length = tl.cdiv(tl.cdiv(num_keys, parts), block_n) * block_n
    return tl.minimum(tl.maximum(length, shortest), longest)


@triton.jit
def _place_of_token(
    row: tl.tensor, first_token: tl.tensor, token: tl.tensor, places_of_row: tl.tensor, num_heads: tl.constexpr
) -> tl.tensor:
    """Return the index of a token's first partial result, counted in heads.

    :param places_of_row: number of tokens reserved per row; 0: results are indexed by token of the batch
    """
    return (tl.where(places_of_row > 0, row * places_of_row, first_token) + token) * num_heads


@triton.jit(
    do_not_specialize=(
        "table_stride",
        "places_of_row",
        "max_seqlen_q",
        "parts",
        "shortest",
        "longest",
        "num_splits",
        "num_tiles",
    )
)
def _attend_split(
    output: tl.tensor,
    output_token_stride: tl.tensor,
    output_head_stride: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
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
    places_of_row: tl.tensor,
    max_seqlen_q: tl.tensor,
    window: tl.tensor,
    parts: tl.tensor,
    shortest: tl.tensor,
    longest: tl.tensor,
    num_splits: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    alibi_slopes: tl.tensor,
    sinks: tl.tensor,
    num_tiles: tl.tensor,
    num_heads: tl.constexpr,
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
    """Attend with one tile of queries over one split; neighboring programs process neighboring KV heads."""
    kv_head = tl.program_id(0) // num_tiles
    first_row = tl.program_id(0) % num_tiles * block_m
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)

    # Three independent loads: in a launch sized for long contexts most splits are empty, and wait for nothing else.
    first_token = tl.load(cu_seqlens_q + row)
    num_tokens = tl.load(cu_seqlens_q + row + 1) - first_token
    context_len = tl.load(context_lens + row)
    first_key, first_tile = _keys_of_row(context_len, num_tokens, window, block_n)
    length = _split_length(context_len - first_tile, parts, shortest, longest, block_n)
    begin = first_tile + split * length
    # Split 0 is never empty, so that zeros are written for a row without keys.
    empty = (split > 0) & (begin >= context_len)
    if empty | (first_row >= num_tokens * group) | (num_tokens > max_seqlen_q):
        return

    tile_row = first_row + tl.arange(0, block_m)
    token = tile_row // group
    head = kv_head * group + tile_row % group
    valid = token < num_tokens
    query_position = context_len - num_tokens + token
    last_token = tl.minimum((first_row + block_m - 1) // group, num_tokens - 1)
    end = tl.minimum(begin + length, context_len - num_tokens + last_token + 1)
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
    sums, peak, total = attend(
        RunningSoftmax(
            no_sums(block_m, padded_size, decoder),
            tl.full((block_m,), float("-inf"), tl.float32),
            tl.zeros((block_m, block_n), tl.float32),  # reduced at the end, since warps share a row
        ),
        Queries(rows, factor, query_position, slope),
        HeadPages(
            key_cache + kv_head.to(tl.int64) * head_stride,
            None if value_cache is None else value_cache + kv_head.to(tl.int64) * head_stride,
            None if k_scale is None else k_scale + kv_head * scale_head_stride,
            None if v_scale is None else v_scale + kv_head * scale_head_stride,
            None if key_offsets is None else key_offsets + kv_head * head_dim,
            offset_stride,
            block_tables + row * table_stride,
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
        begin,
        end,
        first_key,
        block_n,
        True,  # the cost of masks is hidden by the loads of keys
    )

    total = tl.sum(total, 1)
    dim = tl.arange(0, padded_size)
    value_dim: tl.constexpr = head_dim - key_only
    mask = valid[:, None] & (dim < value_dim)[None, :]
    alone = split == 0
    if partial is not None:
        alone = alone & (begin + length >= context_len)
    # A row with a single split is finished here, even if other rows have several.
    if alone:
        result = normalize(joined(sums), peak, total, sinks, head, valid)
        place = (first_token + token).to(tl.int64) * output_token_stride + head * output_head_stride + key_only
        tl.store(output + place[:, None] + dim[None, :], result, mask=mask)
    elif partial is not None:
        result = normalize(joined(sums), peak, total, None, head, valid)
        place = (_place_of_token(row, first_token, token, places_of_row, num_heads) + head) * num_splits + split
        tl.store(partial + place[:, None] * value_dim + dim[None, :], result, mask=mask)
        lse = peak + tl.log2(tl.where(total == 0.0, 1.0, total))  # -inf if no key was seen
        tl.store(partial_lse + place, lse, mask=valid)


@triton.jit(do_not_specialize=("places_of_row", "max_seqlen_q", "parts", "shortest", "longest", "num_splits"))
def _join_splits(
    output: tl.tensor,
    output_token_stride: tl.tensor,
    output_head_stride: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    context_lens: tl.tensor,
    cu_seqlens_q: tl.tensor,
    places_of_row: tl.tensor,
    max_seqlen_q: tl.tensor,
    window: tl.tensor,
    parts: tl.tensor,
    shortest: tl.tensor,
    longest: tl.tensor,
    num_splits: tl.tensor,
    sinks: tl.tensor,
    num_heads: tl.constexpr,
    key_only: tl.constexpr,
    value_dim: tl.constexpr,
    padded_size: tl.constexpr,
    block_n: tl.constexpr,
    block_splits: tl.constexpr,
) -> None:
    """Join the splits of one token and head, weighted by ``exp2`` of their log-sums; sinks are counted once.

    Rows with a single split are already finished.
    """
    head = tl.program_id(0)
    token = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    first_token = tl.load(cu_seqlens_q + row)
    num_tokens = tl.load(cu_seqlens_q + row + 1) - first_token
    context_len = tl.load(context_lens + row)
    _, first_tile = _keys_of_row(context_len, num_tokens, window, block_n)
    num_keys = context_len - first_tile
    used = tl.cdiv(num_keys, _split_length(num_keys, parts, shortest, longest, block_n))
    if (used <= 1) | (token >= num_tokens) | (num_tokens > max_seqlen_q):
        return

    dim = tl.arange(0, padded_size)
    place = (_place_of_token(row, first_token, token, places_of_row, num_heads) + head) * num_splits
    accumulator = tl.zeros((1, padded_size), tl.float32)
    peak = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    for first in range(0, used, block_splits):
        split = first + tl.arange(0, block_splits)
        lse = tl.load(partial_lse + place + split, mask=split < used, other=float("-inf"))
        mask = (split < used)[:, None] & (dim < value_dim)[None, :]
        results = tl.load(partial + (place + split)[:, None] * value_dim + dim[None, :], mask=mask, other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # for tokens without keys in any split so far
        weights = tl.exp2(lse - anchor)
        decay = tl.exp2(peak - anchor)
        peak = new_peak
        total = total * decay + tl.sum(weights, 0)
        accumulator = accumulator * decay[:, None] + tl.sum(weights[:, None] * results, 0)[None, :]
    result = normalize(accumulator, peak, total, sinks, head + tl.arange(0, 1), tl.full((1,), True, tl.int1))
    place_out = (first_token + token).to(tl.int64) * output_token_stride + head * output_head_stride + key_only
    pointers = output + place_out + dim[None, :]
    tl.store(pointers, result, mask=(dim < value_dim)[None, :])

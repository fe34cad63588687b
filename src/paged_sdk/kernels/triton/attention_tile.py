"""Attends with a tile of queries over a range of pages, one tile of keys at a time; both paged kernels share it.

The softmax is the online one of Dao, "FlashAttention-2" (2023), in powers of two: scores are kept in units of
``log2(e)``, so that ``exp2``, one instruction of the hardware, takes the place of ``exp``.

Rows of a tile of queries are (token, head) pairs of one KV head, all heads of a token before the next token. A tile may
begin between two heads of a token, so no row is idle whatever the group size, and each key is loaded once for a group.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from attrs import frozen

from paged_sdk.kernels.key_offsets import KEY_SPAN

__all__ = ["Tile", "attend", "load_query", "normalize", "wide_matrix_units"]

SPAN: tl.constexpr = tl.constexpr(KEY_SPAN)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@frozen
class Tile:
    """Says how large the tiles of a kernel are.

    :ivar block_m: rows of queries, a power of two, at least 16: a matrix instruction has no fewer
    :ivar block_n: keys, a power of two, 16 to 128: a tile lies in one span of ``key_offsets``
    :ivar num_warps: warps of a program
    :ivar num_stages: tiles of keys and values on their way at once
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@functools.cache
def wide_matrix_units(device: torch.device) -> bool:
    """Say whether matrix instructions read keys and values from shared memory (Hopper and data-center Blackwell)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@triton.jit
def load_query(
    query: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    valid: tl.tensor,
    head_dim: tl.constexpr,
    padded_size: tl.constexpr,
    upcast: tl.constexpr,
) -> tl.tensor:
    """Load the rows ``[block_m, padded_size]`` of a tile of queries; rows that are not valid, and padding, are zero."""
    dim = tl.arange(0, padded_size)
    pointers = query + token[:, None] * token_stride + head[:, None] * head_stride + dim[None, :]
    rows = tl.load(pointers, mask=valid[:, None] & (dim < head_dim)[None, :], other=0.0)
    if upcast:
        rows = rows.to(tl.float32)
    return rows


@triton.jit
def _decode(stored: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    if stored.dtype == tl.int8:
        # f8e4m3 without the hardware's help: see kernels.fp8.dequantize_f8e4m3.
        halves = ((stored.to(tl.int16) << 7) & ~0x4000).to(tl.float16, bitcast=True) * 256.0
        return halves.to(dtype)
    return stored.to(dtype)


@triton.jit
def attend(
    accumulator: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    query: tl.tensor,
    query_position: tl.tensor,
    slope: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    key_offsets: tl.tensor,
    offset_stride: tl.tensor,
    block_table: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    scale_block_stride: tl.tensor,
    scale_slot_stride: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    first_key: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    block_n: tl.constexpr,
    masked: tl.constexpr,
) -> tl.tensor:
    """Fold the keys ``begin .. end - 1`` into the running softmax of a tile of queries, ``block_n`` keys at a time.

    :param accumulator: ``[block_m, padded head size]`` float32: sum of the values, weighted by ``exp2(score - peak)``
    :param peak: ``[block_m]`` float32: the greatest score so far, -inf before the first visible key
    :param total: ``[block_m]`` float32: sum of the weights
    :param query_position: ``[block_m]`` int32
    :param slope: ``[block_m]`` float32 or None: ALiBi
    :param key_cache: at the KV head's elements; ``value_cache``, ``k_scale``, ``v_scale``, ``key_offsets`` likewise
    :param block_table: pointer to the sequence's table
    :param begin: a multiple of ``block_n``
    :param first_key: no key, scale or table entry below is read, nor one from ``end`` on: there may be NaN, or no block
    :param masked: False: every query sees every key of ``begin .. end - 1``, a whole number of tiles
    :returns: accumulator, peak, total
    """
    dim = tl.arange(0, accumulator.shape[1])
    position = begin + tl.arange(0, block_n)
    # Looked up per key, since a tile may straddle blocks, and a tile ahead: with the look-up and the loads that depend
    # on it in one turn, Triton 3.6 keeps one buffer of keys and waits for it; so it keeps num_stages of them in flight.
    block = tl.load(block_table + position // block_size, mask=(position >= first_key) & (position < end), other=0)
    for first in range(begin, end, block_n):
        present = tl.full((block_n,), True, tl.int1)
        if masked:
            present = (position >= first_key) & (position < end)
        mask = present[:, None]
        if accumulator.shape[1] != head_dim:
            mask = mask & (dim < head_dim)[None, :]
        slot = position % block_size
        wide = block.to(tl.int64)  # blocks past 2**31 elements
        element = (wide * block_stride + slot * slot_stride)[:, None] + dim[None, :]

        if k_scale is not None:  # before the product that hides their loading
            scale_element = wide * scale_block_stride + slot * scale_slot_stride
            key_scales = tl.load(k_scale + scale_element, mask=present, other=0.0)
            value_scales = tl.load(v_scale + scale_element, mask=present, other=0.0)

        stored_keys = tl.load(key_cache + element, mask=mask, other=0.0)
        if key_offsets is not None:
            # Added to the keys: a product of each query with the offset would take as long, and more registers.
            offset = tl.load(key_offsets + first // SPAN * offset_stride + dim, mask=dim < head_dim, other=0.0)
            keys = (_decode(stored_keys, tl.float32) * key_scales[:, None] + offset[None, :]).to(query.dtype)
        else:
            keys = _decode(stored_keys, query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if k_scale is not None and key_offsets is None:
            # The product is scaled rather than the keys: codes are exact in any dtype, and block_m rows are fewer
            # multiplications than head_dim.
            scores *= key_scales[None, :]
        unit = scale * LOG2_E
        if softcap is not None:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), right at both infinities.
            exponential = tl.exp2(scores * (unit * 2.0 / softcap))
            scores = (softcap * LOG2_E) * (1.0 - 2.0 / (exponential + 1.0))
            unit = 1.0
        if slope is not None:
            distance = position[None, :] - query_position[:, None]
            scores = scores * unit + (slope * LOG2_E)[:, None] * distance.to(tl.float32)
            unit = 1.0
        if masked:
            visible = position[None, :] <= query_position[:, None]
            if window is not None:
                visible = visible & (position[None, :] > query_position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))

        # The unit is positive, so it may be applied after the maximum: one multiplication per row, and below it
        # becomes part of a fused multiply-add.
        new_peak = tl.maximum(peak, tl.max(scores, 1) * unit)
        anchor = new_peak
        if masked:
            anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing seen yet: not -inf - -inf
        weights = tl.exp2(scores * unit - anchor[:, None])
        decay = tl.exp2(peak - anchor)
        peak = new_peak
        total = total * decay + tl.sum(weights, 1)
        accumulator = accumulator * decay[:, None]

        stored = tl.load(value_cache + element, mask=mask, other=0.0)
        if v_scale is not None:
            weights *= value_scales[None, :]
        if v_scale is not None and query.dtype == tl.float16:
            # A weight times a small scale may be below float16's range. bfloat16 has the range, and its rounding of
            # 2**-9 is nothing beside the 2**-4 of f8e4m3.
            accumulator = tl.dot(weights.to(tl.bfloat16), _decode(stored, tl.bfloat16), accumulator)
        else:
            values = _decode(stored, query.dtype)
            accumulator = tl.dot(weights.to(query.dtype), values, accumulator, input_precision="ieee")

        position += block_n
        block = tl.load(block_table + position // block_size, mask=position < end, other=0)
    return accumulator, peak, total


@triton.jit
def normalize(
    accumulator: tl.tensor, peak: tl.tensor, total: tl.tensor, sinks: tl.tensor, head: tl.tensor, valid: tl.tensor
) -> tl.tensor:
    """Divide finished rows ``[block_m, padded head size]`` by their totals; rows whose query saw no key become zero.

    :param sinks: one more logit per head in the denominator, or None
    :param head: ``[block_m]`` int32
    """
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=0.0) * LOG2_E
        # It is bounded, since a sink far above every score would overflow; attention tends to zero there all the same.
        total += tl.exp2(tl.minimum(sink - peak, 126.0))
    return accumulator / tl.where(total == 0.0, 1.0, total)[:, None]

"""Applies rotary position embeddings and writes the KV cache, in one launch."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.key_offsets import KEY_SPAN
from paged_sdk.kernels.triton.kv_cache import as_bytes, cache_heads, num_warps, scale_of_heads, store_head_parts

__all__ = ["rotate_and_cache"]

_ELEMENTS: Final = 1024  # elements per program
SPAN: tl.constexpr = tl.constexpr(KEY_SPAN)


def rotate_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosines: Tensor,
    sines: Tensor,
    cache: LayerCache,
    slot_mapping: Tensor,
    positions: Tensor | None = None,
) -> None:
    """See :func:`paged_sdk.kernels.rotary.rotate_and_cache`. Values that are keys are not read."""
    num_tokens, num_heads, head_dim = query.shape
    if query.numel() == 0:
        return
    num_kv_heads, n = key.shape[1], cosines.shape[1]
    block = triton.next_power_of_2(head_dim)
    block_n = triton.next_power_of_2(max(n, 1))
    block_h, block_q = (
        min(max(_ELEMENTS // elements, 1), triton.next_power_of_2(num_heads)) for elements in (block, 2 * block_n)
    )
    query_parts = triton.cdiv(num_heads, block_q)
    kv_parts = triton.cdiv(num_kv_heads, block_h)
    _rotate_and_cache_kernel[(num_tokens, query_parts + len(cache.pages) * kv_parts)](
        query,
        key,
        value,
        cosines,
        sines,
        as_bytes(cache.key),
        as_bytes(cache.value),
        slot_mapping,
        cache.k_scale,
        cache.v_scale,
        cache.key_offsets,
        positions,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        num_heads,
        num_kv_heads,
        query_parts,
        kv_parts,
        head_dim=head_dim,
        n=n,
        block_q=block_q,
        block_h=block_h,
        block=block,
        block_n=block_n,
        block_rest=triton.next_power_of_2(max(head_dim - 2 * n, 1)),
        num_warps=num_warps(cache.k_scale),
    )


@triton.jit
def _rotate(
    heads: tl.tensor,
    cosine_ptr: tl.tensor,
    sine_ptr: tl.tensor,
    mask: tl.tensor,
    n: tl.constexpr,
    block_n: tl.constexpr,
) -> tl.tensor:
    """Rotate heads in place, and return both halves, rounded."""
    column = tl.arange(0, block_n)[None, :]
    cos = tl.load(cosine_ptr + column, mask=column < n, other=0.0)
    sin = tl.load(sine_ptr + column, mask=column < n, other=0.0)
    first = tl.load(heads + column, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads + n + column, mask=mask, other=0.0).to(tl.float32)
    rotated_first = (first * cos - second * sin).to(heads.dtype.element_ty)
    rotated_second = (second * cos + first * sin).to(heads.dtype.element_ty)
    # If there are fewer elements than threads, several warps read each element and one writes it: wait for all reads.
    tl.debug_barrier()
    tl.store(heads + column, rotated_first, mask=mask)
    tl.store(heads + n + column, rotated_second, mask=mask)
    return rotated_first, rotated_second


@triton.jit
def _rotate_and_cache_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    cosines_ptr: tl.tensor,
    sines_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    key_offsets_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    query_parts: tl.tensor,
    kv_parts: tl.tensor,
    head_dim: tl.constexpr,
    n: tl.constexpr,
    block_q: tl.constexpr,
    block_h: tl.constexpr,
    block: tl.constexpr,
    block_n: tl.constexpr,
    block_rest: tl.constexpr,
) -> None:
    """Rotate and write one token's heads; each program processes a block of query, key or value heads.

    Of queries, only the rotated elements are read, so there are more of them in a block.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cosine_ptr = cosines_ptr + token * n
    sine_ptr = sines_ptr + token * n
    in_half = (tl.arange(0, block_n) < n)[None, :]
    slot = tl.load(slot_ptr + token)
    if part < query_parts:
        query_head = part * block_q + tl.arange(0, block_q)
        query_heads = query_ptr + token * query_stride + query_head[:, None] * query_head_stride
        _rotate(query_heads, cosine_ptr, sine_ptr, (query_head < num_heads)[:, None] & in_half, n, block_n)
    elif part < query_parts + kv_parts:
        key_head = (part - query_parts) * block_h + tl.arange(0, block_h)
        live = (key_head < num_kv_heads)[:, None]
        key_heads = key_ptr + token * key_stride + key_head[:, None] * key_head_stride
        first, second = _rotate(key_heads, cosine_ptr, sine_ptr, live & in_half, n, block_n)
        rest_column = 2 * n + tl.arange(0, block_rest)[None, :]
        rest_mask = live & (rest_column < head_dim)
        rest = tl.load(key_heads + rest_column, mask=rest_mask, other=0.0)
        if key_offsets_ptr is not None:
            span = tl.maximum(tl.load(positions_ptr + token), 0) // SPAN
            offsets = key_offsets_ptr + (span * num_kv_heads + key_head)[:, None] * head_dim
            half_offsets = offsets + tl.arange(0, block_n)[None, :]
            first = first.to(tl.float32) - tl.load(half_offsets, mask=live & in_half, other=0.0)
            second = second.to(tl.float32) - tl.load(half_offsets + n, mask=live & in_half, other=0.0)
            rest = rest.to(tl.float32) - tl.load(offsets + rest_column, mask=rest_mask, other=0.0)
        key_slot = slot * num_kv_heads + key_head
        quantized: tl.constexpr = k_scale_ptr is not None
        scale = key_slot
        if quantized:
            scale = scale_of_heads((first, second, rest))
            tl.store(k_scale_ptr + key_slot, scale, mask=(key_head < num_kv_heads) & (slot >= 0))
        page = key_cache_ptr + key_slot[:, None] * head_dim
        half_page = page + tl.arange(0, block_n)[None, :]
        half_mask = live & in_half & (slot >= 0)
        store_head_parts(half_page, first, scale, half_mask, quantized)
        store_head_parts(half_page + n, second, scale, half_mask, quantized)
        store_head_parts(page + rest_column, rest, scale, rest_mask & (slot >= 0), quantized)
    else:
        value_head = (part - query_parts - kv_parts) * block_h + tl.arange(0, block_h)
        column = tl.arange(0, block)[None, :]
        mask = (value_head < num_kv_heads)[:, None] & (column < head_dim) & (slot >= 0)
        value_place = token * value_stride + value_head[:, None] * value_head_stride + column
        value = tl.load(value_ptr + value_place, mask=mask, other=0.0)
        cache_heads(value, value_cache_ptr, v_scale_ptr, slot, value_head, num_kv_heads, mask, head_dim, block)

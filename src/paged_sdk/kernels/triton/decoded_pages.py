"""Gathers and decodes keys and values from the pages of an f8e4m3 cache to contiguous tensors."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.triton.attention_codes import Decoder, as_pairs, split_codes
from paged_sdk.kernels.triton.attention_tile import SPAN

__all__ = ["gather_decoded"]

_ELEMENTS: Final = 4096  # elements per program
_DECODER: tl.constexpr = tl.constexpr(int(Decoder.PLAIN))


def gather_decoded(cache: LayerCache, slots: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See :func:`paged_sdk.kernels.kv_cache.gather_decoded`."""
    num_keys, num_heads, head_dim = len(slots), cache.num_kv_heads, cache.key.shape[3]
    assert head_dim % 2 == 0, head_dim
    keys = cache.key.new_empty(num_keys, num_heads, head_dim, dtype=dtype)
    values = keys if cache.values_are_keys else torch.empty_like(keys)
    if num_keys == 0:
        return keys, values
    padded = triton.next_power_of_2(head_dim // 2)
    block_k = max(1, _ELEMENTS // (2 * padded))
    # Neighboring programs process neighboring heads, which are adjacent in memory.
    _gather_decoded_kernel[(num_heads, triton.cdiv(num_keys, block_k), len(cache.pages))](
        as_pairs(cache.key),
        as_pairs(cache.value),
        cache.k_scale,
        cache.v_scale,
        cache.key_offsets,
        slots,
        positions,
        keys,
        values,
        num_keys,
        num_heads=num_heads,
        head_dim=head_dim,
        padded=padded,
        block_k=block_k,
        num_warps=4,
    )
    return keys, values


@triton.jit(do_not_specialize=("num_keys",))
def _gather_decoded_kernel(
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    key_offsets: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    num_keys: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """Decode one head's keys or values of a block of slots."""
    head = tl.program_id(0)
    key = tl.program_id(1) * block_k + tl.arange(0, block_k)
    present = key < num_keys
    of_keys = tl.program_id(2) == 0
    vector = tl.load(slots + key, mask=present, other=0).to(tl.int64) * num_heads + head
    pair = tl.arange(0, padded)
    mask = present[:, None] & (pair < head_dim // 2)[None, :]
    codes = (key_cache if of_keys else value_cache) + vector[:, None] * (head_dim // 2) + pair[None, :]
    even, odd = split_codes(tl.load(codes, mask=mask, other=0), _DECODER)
    scale = tl.load((k_scale if of_keys else v_scale) + vector, mask=present, other=0.0)[:, None]
    even *= scale
    odd *= scale
    if key_offsets is not None:
        span = tl.load(positions + key, mask=present, other=0).to(tl.int64) // SPAN
        offset = key_offsets + (span * num_heads + head)[:, None] * head_dim + 2 * pair[None, :]
        even += tl.load(offset, mask=mask & of_keys, other=0.0)
        odd += tl.load(offset + 1, mask=mask & of_keys, other=0.0)
    place = (key.to(tl.int64) * num_heads + head)[:, None] * head_dim + tl.arange(0, 2 * padded)[None, :]
    whole = present[:, None] & (tl.arange(0, 2 * padded) < head_dim)[None, :]
    out = keys if of_keys else values
    tl.store(out + place, tl.interleave(even, odd).to(keys.dtype.element_ty), mask=whole)

"""Causal attention over a paged KV cache: the torch reference gathers the pages, then attends.

Where keys lie is given per token, as slots, worked out once per step and shared by all layers.
"""

from __future__ import annotations

from torch import Tensor

from paged_sdk.kernels.attention import decode_attention, prefill_attention
from paged_sdk.kernels.kv_cache import gather_slots

__all__ = ["paged_decode_attention", "paged_prefill_attention"]


def paged_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """One query token per sequence.

    :param query: ``[batch, num_heads, head_size]``
    :param key_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``; ``value_cache`` likewise
    :param slots: ``[batch, length]`` int64: the keys that each sequence sees. Shorter rows are filled up with any slot
        of the same sequence, never with an unused one: those may hold NaN, which no mask takes out of a product.
    :param mask: ``[batch, length]`` bool, False where ``slots`` is filled up; None: nowhere
    :param k_scale: ``[num_blocks, block_size, num_kv_heads]`` float32, scales of an f8e4m3 cache
    :returns: ``[batch, num_heads, head_size]``, contiguous
    """
    key = gather_slots(key_cache, slots, k_scale, query.dtype)
    value = gather_slots(value_cache, slots, v_scale, query.dtype)
    return decode_attention(query, key, value, mask, scale=scale, softcap=softcap)


def paged_prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Some consecutive query tokens of one sequence, after whatever of it is in the cache.

    :param query: ``[num_tokens, num_heads, head_size]``
    :param slots: ``[length]`` int64: the sequence's keys in order, the last ``num_tokens`` of them the queries' own
    :param window: keys that a query sees, its own included; None: all
    :returns: ``[num_tokens, num_heads, head_size]``, contiguous
    """
    key = gather_slots(key_cache, slots, k_scale, query.dtype)
    value = gather_slots(value_cache, slots, v_scale, query.dtype)
    return prefill_attention(query, key, value, scale=scale, window=window, softcap=softcap)

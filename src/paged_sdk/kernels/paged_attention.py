"""Causal attention over a paged KV cache: the torch reference gathers the pages, then attends.

Where keys lie is given per token, as slots, worked out once per step and shared by all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.kernels.attention import decode_attention, prefill_attention
from paged_sdk.kernels.kv_cache import gather_slots

__all__ = ["paged_attention_reference", "paged_decode_attention", "paged_prefill_attention"]


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
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
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
    return prefill_attention(
        query, key, value, scale=scale, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks
    )


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    max_seqlen_q: int,
    max_context_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Causal attention of a batch of rows, each some consecutive tokens of a sequence, by torch's operations.

    Query token i of a row with n query tokens and context length L is at position L - n + i. It sees the keys at
    positions 0 to its own, or the last ``window`` of them. A token at a negative position (padding: L < n) sees none,
    and its output is zero.

    :param query: ``[num_tokens, num_heads, head_size]`` float32, float16 or bfloat16
    :param key_cache: ``[num_blocks, block_size, num_kv_heads, head_size]`` of the query's dtype or float8_e4m3fn;
        ``value_cache`` likewise
    :param block_tables: ``[num_rows, max_blocks]`` int32; entries of blocks that no query token of the row sees are
        arbitrary
    :param context_lens: ``[num_rows]`` int32: keys of each row, its own query tokens included
    :param cu_seqlens_q: ``[num_rows + 1]`` int32: row r has the query tokens ``cu_seqlens_q[r]:cu_seqlens_q[r + 1]``
    :param max_seqlen_q: at least the most query tokens of a row; kernels size their launch by it, without reading
        ``cu_seqlens_q`` on the host
    :param max_context_len: at least the largest context length, likewise
    :param scale: multiplies the scores
    :param window: keys that a query sees, its own included; None: all
    :param softcap: scores become ``softcap * tanh(score / softcap)``
    :param alibi_slopes: ``[num_heads]`` float32: adds ``slope * (key position - query position)`` to the score, after
        the cap
    :param sinks: ``[num_heads]`` float32: one more logit in each head's softmax, which has no value; neither scaled nor
        capped
    :param k_scale: ``[num_blocks, block_size, num_kv_heads]`` float32, of an f8e4m3 cache only; ``v_scale`` likewise
    :returns: ``[num_tokens, num_heads, head_size]`` of the query's dtype, contiguous
    """
    output = query.new_zeros(query.shape)
    block_size = key_cache.shape[1]
    ends = cu_seqlens_q.tolist()
    rows = zip(ends[:-1], ends[1:], context_lens.tolist(), block_tables, strict=True)
    for first, last, length, table in rows:
        num_tokens = min(last - first, length)
        if num_tokens == 0:
            continue
        begin = 0 if window is None else max(0, length - num_tokens + 1 - window)
        position = torch.arange(begin, length, device=query.device)
        slots = table[position // block_size].long() * block_size + position % block_size
        tokens = slice(last - num_tokens, last)
        output[tokens] = paged_prefill_attention(
            query[tokens],
            key_cache,
            value_cache,
            slots,
            scale=scale,
            window=window,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    return output

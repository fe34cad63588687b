"""Computes causal attention over a paged KV cache (Kwon et al., 2023, arXiv 2309.06180).

:func:`paged_attention` takes block tables. Triton serves it on CUDA, the native kernels on the CPU, and
:func:`paged_attention_reference`, which defines it, elsewhere. :func:`paged_decode_attention` and
:func:`paged_prefill_attention` take slots instead of block tables; callers compute these once per step for all layers.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paged_sdk.kernels import fallback
from paged_sdk.kernels.attention import decode_attention, prefill_attention
from paged_sdk.kernels.attention_inputs import LayerCache, PagedRows, Precision, ScoreOptions
from paged_sdk.kernels.checks import (
    FLOATS,
    check_head_vector,
    check_heads,
    check_key_cache,
    check_rows,
    check_tensor,
)
from paged_sdk.kernels.key_offsets import add_key_offsets, check_key_offsets
from paged_sdk.kernels.kv_cache import gather_slots
from paged_sdk.kernels.native import library
from paged_sdk.kernels.native.paged_attention import (
    AttentionShape,
    VarlenBatch,
    native_paged_attention,
)

__all__ = [
    "paged_attention",
    "paged_attention_reference",
    "paged_decode_attention",
    "paged_prefill_attention",
    "why_not_native",
    "why_not_triton",
]

# With larger heads, a tile of queries and its keys do not fit on a multiprocessor.
_LARGEST_TRITON_HEAD: Final = 512
_MOST_KEY_ONLY: Final = 64


def paged_attention(
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
    key_offsets: Tensor | None = None,
) -> Tensor:
    """Attend causally with a batch of rows, each some consecutive tokens of a sequence: decodes, prefills and chunks.

    Query token i of a row with n query tokens and context length L is at position L - n + i. It sees the keys at
    positions 0 to its own, or the last ``window`` of them. A token at a negative position (padding: L < n) sees none,
    and its output is zero. Contents of slots that no token sees, including NaN, do not affect results.

    All tensors are on one device. The custom op is ``torch.ops.paged_sdk.paged_attention``; it has no gradient.

    :param query: ``[num_tokens, num_heads, head_dim]`` float32, float16 or bfloat16
    :param key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]`` of the query's dtype or float8_e4m3fn,
        contiguous; ``value_cache`` likewise
    :param block_tables: ``[num_rows, max_blocks]`` int32; entries of blocks that no query token of the row sees are
        arbitrary
    :param context_lens: ``[num_rows]`` int32: keys of each row, its own query tokens included
    :param cu_seqlens_q: ``[num_rows + 1]`` int32: row r has the query tokens ``cu_seqlens_q[r]:cu_seqlens_q[r + 1]``
    :param max_seqlen_q: upper bound of the query tokens per row; kernels size their launch by it, without reading
        ``cu_seqlens_q`` on the host
    :param max_context_len: upper bound of the context lengths, likewise
    :param scale: multiplies the scores
    :param window: number of keys that a query sees, its own included; None: all
    :param softcap: scores become ``softcap * tanh(score / softcap)``
    :param alibi_slopes: ``[num_heads]`` float32: adds ``slope * (key position - query position)`` to the score, after
        the cap (Press et al., 2021, arXiv 2108.12409)
    :param sinks: ``[num_heads]`` float32: an extra logit without a value in each head's softmax; neither scaled nor
        capped
    :param k_scale: ``[num_blocks, block_size, num_kv_heads]`` float32, of an f8e4m3 cache only; ``v_scale`` likewise
    :param key_offsets: ``[num_spans, num_kv_heads, head_dim]`` float32, of an f8e4m3 cache only: offsets s were
        subtracted from the keys at positions 128 s to 128 s + 127 of every row before these were stored
        (:mod:`paged_sdk.kernels.key_offsets`)
    :returns: ``[num_tokens, num_heads, head_dim]`` of the query's dtype, contiguous
    :raises ConfigError: shapes, dtypes, strides or devices do not fit; for tensors in CPU memory, also lengths and
        blocks that are out of range. On other devices the caller must ensure that they are in range, since nothing
        waits for the device
    """
    output: Tensor = _paged_attention(
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        cu_seqlens_q,
        max_seqlen_q,
        max_context_len,
        scale,
        window,
        softcap,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        key_offsets,
    )
    return output


def why_not_native(query: Tensor, rows: PagedRows, scores: ScoreOptions) -> str | None:
    """Return why the native CPU kernels cannot serve a call, or None if they can."""
    if query.device.type != "cpu":
        return f"native kernels run on the CPU, not on {query.device.type!r}"
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"native kernels take float32, bfloat16 and float16, not {query.dtype}"
    if query.shape[2] % 16:
        return f"native kernels take head sizes that are multiples of 16, not {query.shape[2]}"
    if scores.alibi_slopes is not None:
        return "native kernels have no alibi"
    if (rows.context_lens < rows.cu_seqlens_q.diff()).any():
        return "native kernels take no padding tokens, and a row has more query tokens than keys"
    return library.why_not()


def why_not_triton(query: Tensor, *, key_only: int = 0) -> str | None:
    """Return why Triton kernels cannot serve a query, or None if they can.

    :param key_only: see :attr:`LayerCache.key_only`
    """
    value_dim = query.shape[2] - key_only
    if value_dim > _LARGEST_TRITON_HEAD:
        return f"Triton kernels take head sizes up to {_LARGEST_TRITON_HEAD}, not {value_dim}"
    if key_only > _MOST_KEY_ONLY:
        return f"Triton kernels take latent vectors with up to {_MOST_KEY_ONLY} rotated elements, not {key_only}"
    if value_dim % 2 or key_only % 2:
        odd = value_dim if value_dim % 2 else key_only
        return f"Triton kernels take even head sizes, not {odd}: they read f8e4m3 in pairs"
    return fallback.why_not_triton(query)


@torch.library.custom_op("paged_sdk::paged_attention", mutates_args=())
def _paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_context_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    key_offsets: Tensor | None = None,
) -> Tensor:
    scores = ScoreOptions(scale=scale, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks)
    check_tensor("query", query, ("num_tokens", "num_heads", "head_dim"), FLOATS, query.device)
    check_key_cache(key_cache, query)
    cache = LayerCache(key_cache, value_cache, k_scale, v_scale, key_offsets)
    check_heads(query.shape[1], cache.num_kv_heads)
    num_rows = context_lens.numel()
    for name, tensor, shape in (
        ("block_tables", block_tables, (num_rows, "max_blocks")),
        ("context_lens", context_lens, ("num_rows",)),
        ("cu_seqlens_q", cu_seqlens_q, (num_rows + 1,)),
    ):
        check_tensor(name, tensor, shape, (torch.int32,), query.device)
    check_head_vector("alibi_slopes", alibi_slopes, query.shape[1], query.device)
    check_head_vector("sinks", sinks, query.shape[1], query.device)
    check_key_offsets(key_offsets, key_cache, max_context_len)
    if query.numel() == 0:
        return query.new_empty(query.shape)
    # Kernels need adjacent heads per token, and contiguous lengths and tables.
    query = query if query.stride()[1:] == (query.shape[2], 1) else query.contiguous()
    rows = PagedRows(
        block_tables=block_tables.contiguous(),
        context_lens=context_lens.contiguous(),
        cu_seqlens_q=cu_seqlens_q.contiguous(),
        max_seqlen_q=max_seqlen_q,
        max_context_len=max_context_len,
    )
    if query.device.type == "cpu":
        check_rows(
            rows.block_tables,
            rows.context_lens,
            rows.cu_seqlens_q,
            num_tokens=len(query),
            num_blocks=key_cache.shape[0],
            block_size=cache.block_size,
            window=window,
            max_seqlen_q=max_seqlen_q,
            max_context_len=max_context_len,
        )
        reason = why_not_native(query, rows, scores)
        if reason is None:
            return _native(query, cache, rows, scores)
    else:
        reason = why_not_triton(query)
    if reason is None:
        from paged_sdk.kernels.triton import paged_attention as triton_kernels

        with fallback.device_of(query):
            return triton_kernels.paged_attention(query, cache, rows, scores)
    fallback.log_fallback("paged_attention", reason)
    return paged_attention_reference(query, cache, rows, scores)


@_paged_attention.register_fake
def _paged_attention_fake(query: Tensor, *_: object, **__: object) -> Tensor:
    return query.new_empty(query.shape)


def _native(query: Tensor, cache: LayerCache, rows: PagedRows, scores: ScoreOptions) -> Tensor:
    native = library.load()
    assert native is not None, "asked without why_not_native"
    _, num_heads, head_dim = query.shape
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=cache.num_kv_heads,
        head_dim=head_dim,
        scale=scores.scale,
        window=scores.window,
        softcap=scores.softcap,
        precision=Precision.BFLOAT16 if query.dtype == torch.bfloat16 else Precision.FLOAT32,
    )
    batch = VarlenBatch(rows.cu_seqlens_q, rows.block_tables, rows.context_lens)
    # A workspace serves one call at a time, and this may be called from any thread; a new one costs a microsecond.
    return native_paged_attention(library.Workspace(native), query, cache, batch, shape, sinks=scores.sinks)


def paged_attention_reference(query: Tensor, cache: LayerCache, rows: PagedRows, scores: ScoreOptions) -> Tensor:
    """Implement :func:`paged_attention` with torch operations, row by row.

    Memory is linear in the context length. Lengths are read on the host, so on devices other than the CPU the host
    waits for queued work.
    """
    output = query.new_zeros(query.shape)
    block_size, window = cache.block_size, scores.window
    ends = rows.cu_seqlens_q.tolist()
    for first, last, length, table in zip(
        ends[:-1], ends[1:], rows.context_lens.tolist(), rows.block_tables, strict=True
    ):
        num_tokens = min(last - first, length)
        if num_tokens == 0:
            continue
        begin = 0 if window is None else max(0, length - num_tokens + 1 - window)
        position = torch.arange(begin, length, device=query.device)
        slots = table[position // block_size].long() * block_size + position % block_size
        tokens = slice(last - num_tokens, last)
        output[tokens] = paged_prefill_attention(query[tokens], cache, slots, scores, position)
    return output


def paged_decode_attention(
    query: Tensor,
    cache: LayerCache,
    slots: Tensor,
    mask: Tensor | None,
    scores: ScoreOptions,
    positions: Tensor | None = None,
) -> Tensor:
    """Attend with one query token per sequence.

    :param query: ``[batch, num_heads, head_dim]``
    :param slots: ``[batch, length]`` int64: slots of the keys that each sequence sees. Shorter rows are padded with any
        slot of the same sequence, never with an unused one: that may hold NaN, which a mask does not remove from a
        product
    :param mask: ``[batch, length]`` bool, False for padding; None: no padding
    :param scores: scale, softcap, slopes and sinks; its window is not applied, ``slots`` must exclude keys before it
    :param positions: like ``slots``: positions of the slots' tokens; needed if the cache has key offsets
    :returns: ``[batch, num_heads, head_dim]``, contiguous
    """
    key, value = _gather(cache, slots, positions, query.dtype)
    return decode_attention(query, key, value, mask, scores)


def paged_prefill_attention(
    query: Tensor,
    cache: LayerCache,
    slots: Tensor,
    scores: ScoreOptions,
    positions: Tensor | None = None,
    blocks: Tensor | None = None,
) -> Tensor:
    """Attend with the last tokens of one sequence over its keys in the cache, their own included.

    :param query: ``[num_tokens, num_heads, head_dim]``
    :param slots: ``[length]`` int64: slots of the sequence's keys in order, the last ``num_tokens`` the queries' own
    :param positions: like ``slots``: positions of the slots' tokens; needed if the cache has key offsets
    :param blocks: see :func:`~paged_sdk.kernels.attention.prefill_attention`
    :returns: ``[num_tokens, num_heads, head_dim]``, contiguous
    """
    key, value = _gather(cache, slots, positions, query.dtype)
    return prefill_attention(query, key, value, scores, blocks)


def _gather(cache: LayerCache, slots: Tensor, positions: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Read the keys and values of slots. Key offsets are added back before keys are rounded to ``dtype``."""
    if cache.values_are_keys:
        assert cache.key_offsets is None, "offsets are subtracted from keys alone"
        key = gather_slots(cache.key, slots, cache.k_scale, dtype)
        return key, key
    value = gather_slots(cache.value, slots, cache.v_scale, dtype)
    if cache.key_offsets is None:
        return gather_slots(cache.key, slots, cache.k_scale, dtype), value
    assert positions is not None, "key_offsets without positions"
    stored = gather_slots(cache.key, slots, cache.k_scale, torch.promote_types(dtype, torch.float32))
    return add_key_offsets(stored, cache.key_offsets, positions).to(dtype), value

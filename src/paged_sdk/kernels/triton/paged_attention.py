"""Computes paged attention of any batch, choosing the decode or the prefill kernel for its rows."""

from __future__ import annotations

from typing import Final

import torch
import triton
from attrs import evolve
from torch import Tensor

from paged_sdk.kernels.attention_inputs import LayerCache, PagedRows, ScoreOptions
from paged_sdk.kernels.triton.attention_tile_choices import LARGEST_DECODE_TILE
from paged_sdk.kernels.triton.availability import num_multiprocessors
from paged_sdk.kernels.triton.paged_batch import PagedBatch
from paged_sdk.kernels.triton.paged_decode import paged_decode_attention
from paged_sdk.kernels.triton.paged_prefill import paged_prefill_attention

__all__ = ["paged_attention"]

_FEWEST_ROWS: Final = 16  # of a tile


def paged_attention(
    query: Tensor, cache: LayerCache, rows: PagedRows, scores: ScoreOptions, *, out: Tensor | None = None
) -> Tensor:
    """Implement :func:`~paged_sdk.kernels.paged_attention.paged_attention` with Triton kernels.

    The decode kernel serves batches whose rows each fit in one of its tiles (decodes, drafts), or whose tiles alone
    would leave multiprocessors idle (the rest of a prompt after a cached prefix). In other batches the prefill kernel
    serves rows of several tokens, and the decode kernel rows that fit in its smallest tile: if one program processed a
    long context alone beside prompt chunks, it would finish last.

    Nothing waits for the device; launches are sized by host integers only. Only query tokens after the last row's are
    left unwritten.

    :param out: ``[num_tokens, num_heads, head_dim]``, written and returned; None: a new tensor
    """
    max_seqlen_q, max_context_len = rows.max_seqlen_q, rows.longest(cache.block_size)
    if scores.scale <= 0:  # the kernels apply the scale after the maximum, so it must be positive
        query = -query if scores.scale < 0 else torch.zeros_like(query)
        scores = evolve(scores, scale=-scores.scale or 1.0)
    if scores.window is not None and scores.window >= max_context_len:
        scores = evolve(scores, window=None)  # saves the masks at the window's edge
    if query.stride(2) != 1:
        query = query.contiguous()
    batch = PagedBatch(query, cache, _readable_rows(rows), _readable_scores(scores))
    num_rows, group = batch.num_rows, batch.group
    tiles_of_row = triton.cdiv(max_seqlen_q * group, LARGEST_DECODE_TILE)
    idle = num_rows * batch.num_kv_heads * tiles_of_row < num_multiprocessors(query.device)
    if max_seqlen_q == 1 or tiles_of_row == 1 or idle:
        return paged_decode_attention(batch, max_seqlen_q=max_seqlen_q, max_context_len=max_context_len, out=out)
    few = max(1, _FEWEST_ROWS // group) if num_rows > 1 else 0
    output = paged_prefill_attention(batch, min_seqlen_q=few + 1, out=out)
    if few:
        paged_decode_attention(batch, max_seqlen_q=few, max_context_len=max_context_len, out=output)
    return output


def _readable_rows(rows: PagedRows) -> PagedRows:
    """Return the same rows with contiguous tensors."""
    tensors = rows.block_tables, rows.context_lens, rows.cu_seqlens_q
    if all(tensor.stride(-1) == 1 for tensor in tensors):
        return rows
    tables, lengths, ends = (tensor.contiguous() for tensor in tensors)
    return evolve(rows, block_tables=tables, context_lens=lengths, cu_seqlens_q=ends)


def _readable_scores(scores: ScoreOptions) -> ScoreOptions:
    """Return the same options with contiguous vectors of heads."""
    slopes, sinks = scores.alibi_slopes, scores.sinks
    if slopes is None and sinks is None:
        return scores
    return evolve(
        scores,
        alibi_slopes=None if slopes is None else slopes.contiguous(),
        sinks=None if sinks is None else sinks.contiguous(),
    )

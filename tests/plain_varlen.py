"""Compute, row by row, what FlashAttention computes over keys that lie side by side."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from paged_sdk.kernels.attention import prefill_attention
from paged_sdk.kernels.attention_inputs import ScoreOptions


def plain_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend row by row; refuse what FlashAttention could not take or would misunderstand."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert len(cu_seqlens_q) == len(cu_seqlens_k)
    for tensor in (query, key, value):  # it loads 16 bytes at a time
        assert tensor.stride(2) == 1
        assert tensor.data_ptr() % 16 == 0
        assert not any(stride * tensor.itemsize % 16 for stride in tensor.stride()[:2])
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) <= max_seqlen_k
    assert int(cu_seqlens_k[-1]) <= len(key) == len(value)
    output = torch.zeros_like(query) if out is None else out
    queries, keys = (itertools.pairwise(ends.tolist()) for ends in (cu_seqlens_q, cu_seqlens_k))
    for (first, last), (first_key, last_key) in zip(queries, keys, strict=True):
        output[first:last] = 0
        first = max(first, last - (last_key - first_key))  # tokens before it see nothing
        if last > first:
            output[first:last] = prefill_attention(
                query[first:last],
                key[first_key:last_key],
                value[first_key:last_key],
                ScoreOptions(scale=scale, window=window),
            )
    return output

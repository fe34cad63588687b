"""Computes causal attention over contiguous keys and values, as the torch reference of every attention kernel.

Grouped-query attention folds the query heads that share a KV head into rows of one matrix product: ``[KV heads, rows,
head_dim]``. With one query row per head, torch's own ``enable_gqa`` takes 5 to 15 times as long on a CPU.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.kernels.attention_inputs import ScoreOptions

__all__ = ["decode_attention", "masked_attention", "prefill_attention"]

# Queries are processed in tiles. 128 rows are within 10 % of the fastest tile at 512 to 4,096 keys on two cores. Over
# long contexts tiles shrink, so that the scores of a tile, if materialized, are at most 2**25 elements (128 MB in
# float32).
_MAX_TILE: Final = 128
_MIN_TILE: Final = 16
_MAX_SCORES: Final = 2**25


def decode_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: ScoreOptions) -> Tensor:
    """Attend with one query token per sequence.

    :param query: ``[batch, num_heads, head_dim]``
    :param key: ``[batch, length, num_kv_heads, head_dim]``; ``value`` likewise. Masked keys and values must be finite
    :param mask: ``[batch, length]`` bool, True where a key is seen; None: every key is seen
    :param scores: scale, softcap, slopes and sinks; its window is not applied, the mask must exclude keys before it.
        Its relative biases must be None
    :returns: ``[batch, num_heads, head_dim]``, contiguous
    """
    assert scores.relative is None, "a batch of sequences does not go with relative biases"
    groups = torch.unflatten(query, 1, (key.shape[2], -1))
    seen = None if mask is None else mask[:, None, None]
    slopes, sinks = (
        None if each is None else each.view(key.shape[2], -1, 1) for each in (scores.alibi_slopes, scores.sinks)
    )
    bias = None
    if slopes is not None:
        # Distances are from the row's last key, which is the query's own.
        position = torch.arange(key.shape[1], device=key.device).expand(len(key), -1)
        last = position.amax(1) if mask is None else position.where(mask, 0).amax(1)
        bias = slopes * (position - last[:, None])[:, None, None]
    return _attend(groups, key.transpose(1, 2), value.transpose(1, 2), seen, scores, bias=bias, sinks=sinks).flatten(
        1, 2
    )


def prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, scores: ScoreOptions, blocks: Tensor | None = None
) -> Tensor:
    """Attend with consecutive query tokens of one sequence, causally unless ``scores`` says otherwise. Memory is linear
    in both lengths.

    :param query: ``[num_tokens, num_heads, head_dim]``
    :param key: ``[length, num_kv_heads, head_dim]``, of which the last ``num_tokens`` are the queries' own; ``value``
        likewise
    :param blocks: ``[length]`` int64: the bidirectional block of each key, such as an image; negative: none. A query
        sees all keys of its own block, later ones included, except those before its window
    :returns: ``[num_tokens, num_heads, head_dim]``, contiguous
    """
    window = scores.window
    num_tokens, num_heads, _ = query.shape
    length, num_kv_heads, _ = key.shape
    groups = torch.unflatten(query, 1, (num_kv_heads, -1)).transpose(0, 1)  # [KV heads, tokens, group, head_dim]
    heads_key, heads_value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    output = query.new_empty(query.shape)
    tile = max(_MIN_TILE, min(_MAX_TILE, _MAX_SCORES // (num_heads * length)))
    position = torch.arange(length, device=query.device)
    group_slopes, group_sinks = (
        None if each is None else each.view(num_kv_heads, 1, -1, 1) for each in (scores.alibi_slopes, scores.sinks)
    )
    for first in range(0, num_tokens, tile):
        last = min(first + tile, num_tokens)
        end = length - num_tokens + last
        begin = 0 if window is None else max(0, length - num_tokens + first + 1 - window)
        queries = slice(length - num_tokens + first, end)
        if blocks is not None or scores.bidirectional:
            end = length
        own, keys = position[queries, None], position[begin:end]
        mask = keys < own + (length if window is None else window) if scores.bidirectional else keys <= own
        if blocks is not None:
            mask |= (blocks[queries, None] == blocks[begin:]) & (blocks[begin:] >= 0)
        if window is not None:
            mask &= keys > own - window
        rows = groups[:, first:last].flatten(1, 2)[None]
        rows_mask = mask.repeat_interleave(num_heads // num_kv_heads, 0)[None, None]
        bias = None if group_slopes is None else (group_slopes * (keys - own)[None, :, None]).flatten(1, 2)
        if scores.relative is not None:
            added = scores.relative.between(position[queries], keys, length - num_tokens)
            # [KV heads, tokens * group, keys], as the rows
            added = torch.unflatten(added, 0, (num_kv_heads, -1)).transpose(1, 2).flatten(1, 2)
            bias = added if bias is None else bias + added
        rows_sinks = None if group_sinks is None else group_sinks.expand(-1, last - first, -1, -1).flatten(1, 2)
        tile_output = _attend(
            rows,
            heads_key[:, :, begin:end],
            heads_value[:, :, begin:end],
            rows_mask,
            scores,
            bias=bias,
            sinks=rows_sinks,
        )
        output[first:last] = torch.unflatten(tile_output[0], 1, (last - first, -1)).transpose(0, 1).flatten(1, 2)
    return output


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scores: ScoreOptions,
) -> Tensor:
    """Attend within one sequence, with a mask instead of causality.

    :param query: ``[num_tokens, num_heads, head_dim]``
    :param key: ``[length, num_kv_heads, head_dim]``; the queries are at the last positions; ``value`` likewise
    :param mask: ``[1 or num_heads, num_tokens, length]`` bool, True where a key is seen, or floating point, added to
        the scores. The output of a query that sees no key is zero
    :param scores: its window is applied in addition to the mask; its sinks and relative biases must be None
    :returns: ``[num_tokens, num_heads, head_dim]``, contiguous
    """
    assert scores.sinks is None, "masks do not go with sinks"
    assert scores.relative is None, "masks do not go with relative biases"
    window, alibi_slopes = scores.window, scores.alibi_slopes
    num_tokens, num_heads, _ = query.shape
    length, num_kv_heads, _ = key.shape
    heads_key, heads_value = (
        each.repeat_interleave(num_heads // num_kv_heads, 1).transpose(0, 1)[None] for each in (key, value)
    )
    output = query.new_empty(query.shape)
    position = torch.arange(length, device=query.device)
    tile = max(_MIN_TILE, min(_MAX_TILE, _MAX_SCORES // max(num_heads * length, 1)))
    for first in range(0, num_tokens, tile):
        last = min(first + tile, num_tokens)
        own = torch.arange(length - num_tokens + first, length - num_tokens + last, device=query.device)[:, None]
        part = mask[:, first:last]
        bias = None if mask.dtype == torch.bool else part
        seen = part if bias is None else part > -torch.inf
        if window is not None:
            seen = seen & (position > own - window)
        if alibi_slopes is not None:
            slant = alibi_slopes[:, None, None] * (position - own)
            bias = slant if bias is None else bias + slant
        rows = query[first:last].transpose(0, 1)[None]
        tile_output = _attend(rows, heads_key, heads_value, seen, scores, bias=bias)[0]
        output[first:last] = tile_output.masked_fill(~seen.any(-1, keepdim=True), 0).transpose(0, 1)
    return output


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: ScoreOptions,
    *,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with queries ``[batch, KV heads, rows, head_dim]`` over keys ``[batch, KV heads, length, head_dim]``.

    :param mask: bool, True where a key is seen; broadcast to the scores, ``[batch, KV heads, rows, length]``
    :param bias: added to the scores; broadcast likewise
    :param sinks: ``[KV heads, rows, 1]``: an extra logit per row
    """
    scale, softcap = options.scale, options.softcap
    if softcap is None and bias is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = torch.matmul(query, key.mT).to(torch.promote_types(query.dtype, torch.float32))
    if softcap is None:
        scores.mul_(scale)
    else:
        scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores.add_(bias)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(len(scores), -1, -1, -1)), -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return torch.matmul(weights.to(query.dtype), value)

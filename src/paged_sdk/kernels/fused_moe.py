"""A mixture of experts: for each token a few gated MLPs of many, added up by weight (Shazeer et al., 2017, 1701.06538).

Reading weights is what costs time while the tokens are few, so an expert's matrices are read once for all its tokens,
and those of an expert that no token uses not at all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["fused_moe", "fused_moe_by_expert", "route"]


def route(logits: Tensor, num_selected: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Choose each token's experts: the likeliest of a softmax over all of them.

    :param logits: the router's, ``[num_tokens, num_experts]``
    :param renormalise: divide the weights by their sum; False: they are what the softmax gave
    :returns: ``topk_weights`` float32 (float64 of float64 logits) and ``topk_ids`` int64, ``[num_tokens,
        num_selected]`` each, the likeliest first
    """
    weights, ids = logits.softmax(-1, dtype=_accumulator(logits)).topk(num_selected)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), ids


def fused_moe(hidden: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Apply to each token its experts' SwiGLU MLPs: ``sum of weight * down @ (silu(gate @ x) * (up @ x))``.

    A ``torch.library`` operator, ``paged_sdk::fused_moe``, with a kernel for shapes only: it compiles and exports.

    :param hidden: ``[num_tokens, hidden_size]``
    :param gate_up: ``[num_experts, 2 * intermediate_size, hidden_size]`` of the same dtype: gate's rows, then up's
    :param down: ``[num_experts, hidden_size, intermediate_size]`` of the same dtype
    :param topk_weights: ``[num_tokens, num_selected]`` float32
    :param topk_ids: likewise, int64 or int32, below ``num_experts``: which experts
    :returns: ``[num_tokens, hidden_size]`` of the same dtype; a token's experts are added up in float32
    """
    result: Tensor = _operator(hidden, gate_up, down, topk_weights, topk_ids)
    return result


def fused_moe_by_expert(
    hidden: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor
) -> Tensor:
    """The reference of :func:`fused_moe`, in torch's operations: one expert after the other."""
    order = topk_ids.flatten().argsort(stable=True)
    tokens = order // topk_ids.shape[1]
    weights = topk_weights.flatten()[order].unsqueeze(-1)
    rows = hidden[tokens]
    out = torch.zeros_like(hidden, dtype=_accumulator(hidden))
    first = 0
    for expert, count in enumerate(topk_ids.flatten().bincount().tolist()):
        if not count:
            continue
        own = slice(first, first + count)
        gate, up = F.linear(rows[own], gate_up[expert]).chunk(2, dim=-1)
        mapped = F.linear(F.silu(gate).mul_(up), down[expert])
        out.index_add_(0, tokens[own], mapped * weights[own])
        first += count
    return out.to(hidden.dtype)


@torch.library.custom_op("paged_sdk::fused_moe", mutates_args=())
def _operator(hidden: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    return fused_moe_by_expert(hidden, gate_up, down, topk_weights, topk_ids)


@_operator.register_fake
def _(hidden: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    return torch.empty_like(hidden)


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)

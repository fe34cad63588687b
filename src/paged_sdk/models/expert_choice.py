"""Choose each token's experts and the weights of their outputs, from the scores of a router."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.config.moe import MoeConfig
from paged_sdk.kernels.fused_moe import route

__all__ = ["choose_experts"]


def choose_experts(logits: Tensor, config: MoeConfig, choice_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose each token's experts.

    The plain choice by a softmax is one kernel; the others are computed one operation at a time.

    :param logits: the router's scores, ``[num_tokens, num_experts]``
    :param choice_bias: added to the experts' weights when they are chosen, ``[num_experts]``
    :returns: the weights of the experts' outputs, float32 (float64 of float64 logits), and which experts, int64,
        ``[num_tokens, num_experts_per_token]`` each
    """
    if config.sparse_mixer is not None:
        return _mix_sparsely(logits, config.sparse_mixer)
    if config.sigmoid_scores or config.has_choice_bias or config.num_groups_per_token < config.num_groups:
        return _choose(logits, config, choice_bias)
    weights, ids = route(logits, config.num_experts_per_token, renormalize=config.renormalize)
    return _scaled(weights, config), ids


def _choose(logits: Tensor, config: MoeConfig, choice_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose the experts with the largest weights, after ``choice_bias`` is added to these (Liu et al., 2024, arXiv
    2408.15664).
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    every = scores.sigmoid() if config.sigmoid_scores else scores.softmax(-1)
    preferred = every if choice_bias is None else every + choice_bias
    if config.num_groups_per_token < config.num_groups:
        preferred = _of_best_groups(preferred, config)
    ids = preferred.topk(config.num_experts_per_token).indices
    weights = every.gather(-1, ids)
    if config.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True).clamp(min=config.min_sum) + config.sum_offset)
    return _scaled(weights, config), ids


def _of_best_groups(preferred: Tensor, config: MoeConfig) -> Tensor:
    """Return the weights with those of all but the best groups of experts set to -inf (DeepSeek-AI, 2024, arXiv
    2405.04434).
    """
    groups = torch.unflatten(preferred, -1, (config.num_groups, -1))
    best = groups.topk(config.group_score_size).values.sum(-1).topk(config.num_groups_per_token).indices
    is_left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
    return groups.masked_fill(is_left_out.unsqueeze(-1), -torch.inf).flatten(-2)


def _scaled(weights: Tensor, config: MoeConfig) -> Tensor:
    return weights if config.routed_scale == 1.0 else weights * config.routed_scale


def _mix_sparsely(logits: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """Choose the two experts with the largest scores, each weighted by a softmax over the scores near its own
    (SparseMixer; Liu et al., 2023, arXiv 2310.00811).

    :param logits: the router's scores, ``[num_tokens, num_experts]``
    :param margin: a score is near the chosen one if it is less by at most this fraction of the larger magnitude
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    left, weights, ids = scores, [], []
    for _ in range(2):
        best, chosen = left.max(-1, keepdim=True)
        is_less = (best - scores) > margin * scores.abs().clamp(min=best)
        weights.append(left.masked_fill(is_less, -torch.inf).softmax(-1).gather(-1, chosen))
        ids.append(chosen)
        left = left.scatter(-1, chosen, -torch.inf)
    return torch.cat(weights, -1), torch.cat(ids, -1)

"""Choose each token's experts and the weights of their outputs, from the scores of a router."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paged_sdk.config.moe import MoeConfig
from paged_sdk.kernels.fused_moe import route
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.routing import ExpertChoice, NativeRouting

__all__ = ["ExpertChooser", "choose_experts"]

_NUM_MIXED: Final = 2
"""The number of experts per token that SparseMixer chooses."""


class ExpertChooser:
    """Chooses each token's experts: in one native call on the CPU, and as :func:`choose_experts` defines elsewhere.

    :param bias: added to the experts' weights when they are chosen, ``[num_experts]``; None: nothing is added
    :param factors: multiply the weights of the experts' outputs, ``[num_experts]``; None: nothing does
    :param workspace: the native kernels' workspace; None: no native kernels
    :ivar native: describes the choice to the native kernels
    """

    def __init__(
        self,
        config: MoeConfig,
        *,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self._config = config
        self._bias = bias
        self._factors = factors
        self.native: ExpertChoice = _described(config, bias, factors)
        self._routing = None if workspace is None else NativeRouting(workspace, self.native)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as :func:`choose_experts`, times the factors."""
        if self._routing is not None and logits.dtype is not torch.float64:
            return self._routing(logits)
        weights, ids = choose_experts(logits, self._config, self._bias)
        return (weights if self._factors is None else weights * self._factors[ids].to(weights.dtype)), ids


def _described(config: MoeConfig, bias: Tensor | None, factors: Tensor | None) -> ExpertChoice:
    """Describe a choice to the native kernels."""
    count, selected = config.num_experts, config.num_experts_per_token
    if config.sparse_mixer is not None:
        return ExpertChoice(
            num_experts=count,
            num_selected=_NUM_MIXED,
            scoring="sparse_mixer",
            margin=config.sparse_mixer,
            factors=factors,
        )
    return ExpertChoice(
        num_experts=count,
        num_selected=selected,
        scoring="sigmoid" if config.sigmoid_scores else "softmax",
        renormalize=config.renormalize,
        bias=bias,
        factors=factors,
        num_groups=config.num_groups,
        num_groups_selected=config.num_groups_per_token,
        group_score_size=config.group_score_size,
        min_sum=config.min_sum,
        sum_offset=config.sum_offset,
        scale=config.routed_scale,
    )


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
    for _ in range(_NUM_MIXED):
        best, chosen = left.max(-1, keepdim=True)
        is_less = (best - scores) > margin * scores.abs().clamp(min=best)
        weights.append(left.masked_fill(is_less, -torch.inf).softmax(-1).gather(-1, chosen))
        ids.append(chosen)
        left = left.scatter(-1, chosen, -torch.inf)
    return torch.cat(weights, -1), torch.cat(ids, -1)

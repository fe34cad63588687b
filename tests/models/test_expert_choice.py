"""Routers of every kind choose the experts that transformers' routers choose, with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    GraniteMoeConfig,
    Lfm2MoeConfig,
    MiniMaxM2Config,
    PhimoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

from native_weights import needs_library, workspace
from paged_sdk.config.moe import MoeConfig
from paged_sdk.models.expert_choice import ExpertChooser, choose_experts

_COUNT: Final = 12
_SIZES: Final[dict[str, Any]] = {"hidden_size": _COUNT, "num_experts_per_tok": 4}
_GROUPS: Final[dict[str, Any]] = {
    "n_routed_experts": _COUNT,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
_OURS: Final[dict[str, Any]] = {"num_groups": 4, "num_groups_per_token": 2, "routed_scale": 2.5}
_V3: Final[dict[str, Any]] = {"sigmoid_scores": True, "has_choice_bias": True, "group_score_size": 2}


def config(**settings: Any) -> MoeConfig:
    usual: dict[str, Any] = {"layers": frozenset({0}), "num_experts": _COUNT, "num_experts_per_token": 4}
    return MoeConfig(**usual | {"intermediate_size": 32, "renormalize": True} | settings)


def routed(router_class: Any, config: Any, logits: Tensor, *bias: Tensor, own: str = "") -> tuple[Tensor, Tensor]:
    """Return what a router chooses whose scores are its input.

    :param bias: what is added for the choice, if the router takes it with the scores
    :param own: the name of the router's tensor of it otherwise
    """
    router: Any = router_class(config).eval()  # in training, some add noise
    if own:
        router.state_dict()[own].copy_(*bias)
    router.weight.data.copy_(torch.eye(_COUNT))
    _, weights, ids = router(logits, *(() if own else bias))
    return weights, ids


def deepseek_v2(logits: Tensor, bias: Tensor, *, method: str = "group_limited_greedy") -> tuple[Tensor, Tensor]:
    sizes = _SIZES | _GROUPS | {"num_attention_heads": 4, "topk_method": method}
    return routed(DeepseekV2TopkRouter, DeepseekV2Config(**sizes), logits)


def deepseek_v3(logits: Tensor, bias: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    sizes = _SIZES | _GROUPS | settings
    return routed(DeepseekV3TopkRouter, DeepseekV3Config(**sizes), logits, bias, own="e_score_correction_bias")


def ernie(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    sizes: dict[str, Any] = {"hidden_size": _COUNT, "moe_k": 4, "moe_num_experts": _COUNT, "moe_norm_min": 0.3}
    own = "moe_statics.e_score_correction_bias"
    return routed(Ernie4_5_MoeTopKRouter, Ernie4_5_MoeConfig(**sizes), logits, bias[None], own=own)


def granite(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return routed(GraniteMoeTopKRouter, GraniteMoeConfig(**_SIZES, num_local_experts=_COUNT), logits)


def lfm2(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    sizes = _SIZES | {"num_experts": _COUNT, "routed_scaling_factor": 1.5}
    return routed(Lfm2MoeTopKRouter, Lfm2MoeConfig(**sizes), logits, bias)


def phi(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    made = PhimoeConfig(**_SIZES, num_local_experts=_COUNT, router_jitter_noise=0.2)
    return routed(PhimoeTopKRouter, made, logits)


def minimax(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return routed(MiniMaxM2TopKRouter, MiniMaxM2Config(**_SIZES, num_local_experts=_COUNT), logits, bias)


ROUTERS: Final[dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], dict[str, Any]]]] = {
    "deepseek_v2": (deepseek_v2, _OURS | {"renormalize": False}),
    "deepseek_v2 without groups": (
        lambda logits, bias: deepseek_v2(logits, bias, method="greedy"),
        {"renormalize": False, "routed_scale": 2.5},
    ),
    "deepseek_v3": (deepseek_v3, _OURS | _V3 | {"sum_offset": 1e-20}),
    "deepseek_v3 as it is": (
        lambda logits, bias: deepseek_v3(logits, bias, norm_topk_prob=False),
        _OURS | _V3 | {"renormalize": False},
    ),
    "ernie4_5_moe": (ernie, {"has_choice_bias": True, "min_sum": 0.3}),
    "granitemoe": (granite, {}),
    "lfm2_moe": (lfm2, {"sigmoid_scores": True, "has_choice_bias": True, "sum_offset": 1e-6, "routed_scale": 1.5}),
    "phimoe": (phi, {"sparse_mixer": 0.4, "renormalize": False}),
    "minimax_m2": (minimax, {"sigmoid_scores": True, "has_choice_bias": True}),
}


def both_ways(logits: Tensor, own: MoeConfig, bias: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Choose one operation at a time, and in one native call."""
    given = bias if own.has_choice_bias else None
    yield choose_experts(logits, own, given)
    yield ExpertChooser(own, bias=given, workspace=workspace()).choose(logits)


@needs_library
@pytest.mark.parametrize("family", ROUTERS)
def test_experts_and_weights_are_those_of_transformers(family: str) -> None:
    reference, settings = ROUTERS[family]
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(500, _COUNT, generator=draw) * 2
    bias = torch.randn(_COUNT, generator=draw) * 0.3
    with torch.inference_mode():
        expected_weights, expected_ids = reference(logits, bias)
        for weights, ids in both_ways(logits, config(**settings), bias):
            assert spread(weights, ids).allclose(spread(expected_weights, expected_ids), rtol=1e-5, atol=0)


@needs_library
def test_factors_of_experts() -> None:
    own, factors = config(), torch.arange(_COUNT) / 4
    logits = torch.randn(50, _COUNT, generator=torch.Generator().manual_seed(0))
    weights, ids = choose_experts(logits, own)
    for space in (None, workspace()):
        chosen = ExpertChooser(own, factors=factors, workspace=space).choose(logits)
        expected = spread(weights * factors[ids], ids)
        assert spread(*chosen).allclose(expected, rtol=1e-5, atol=0)


@needs_library
def test_float64_stays_float64() -> None:
    logits = torch.randn(5, _COUNT, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights, _ = ExpertChooser(config(), workspace=workspace()).choose(logits)
    assert weights.dtype is torch.float64


@needs_library
@pytest.mark.parametrize(
    ("family", "setting", "usual"),
    [
        ("deepseek_v2", "num_groups_per_token", 4),
        ("deepseek_v3", "num_groups_per_token", 4),
        ("deepseek_v3", "group_score_size", 1),
        ("deepseek_v3", "has_choice_bias", False),
        ("deepseek_v3", "sigmoid_scores", False),
        ("deepseek_v3", "routed_scale", 1.0),
        ("ernie4_5_moe", "min_sum", 0.0),
        ("lfm2_moe", "renormalize", False),
        ("phimoe", "sparse_mixer", 0.01),
    ],
)
def test_every_setting_changes_something(family: str, setting: str, usual: object) -> None:
    """The comparison above would fail without the setting."""
    reference, settings = ROUTERS[family]
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(500, _COUNT, generator=draw) * 2
    bias = torch.randn(_COUNT, generator=draw) * 0.3
    other = config(**settings | {setting: usual})
    with torch.inference_mode():
        expected = spread(*reference(logits, bias))
        for chosen in both_ways(logits, other, bias):
            assert not spread(*chosen).allclose(expected, rtol=1e-3, atol=0)


def spread(weights: Tensor, ids: Tensor) -> Tensor:
    """Return the weight of every expert, 0 of those that are not chosen: transformers' order is arbitrary."""
    return torch.zeros(len(weights), _COUNT).scatter(-1, ids, weights.float())


def test_no_expert_of_another_group_is_chosen_in_low_precision() -> None:
    own = config(**_OURS | _V3)
    logits = torch.randn(200, _COUNT, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, ids = choose_experts(logits, own, torch.zeros(_COUNT))
    assert weights.dtype is torch.float32
    assert all(len({int(expert) // 3 for expert in row}) <= 2 for row in ids)
    assert all(len(set(row.tolist())) == 4 for row in ids)

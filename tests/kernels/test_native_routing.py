"""The choice of experts in one native call, against torch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from native_weights import every_level, needs_library, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.routing import ExpertChoice, NativeRouting

pytestmark = needs_library


def drawn(num_tokens: int, num_experts: int, *, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed)) * 3


def routed(scores: Tensor, *, isa: str | None = None, num_threads: int = 1, **choice: Any) -> tuple[Tensor, Tensor]:
    described = ExpertChoice(num_experts=scores.shape[1], **choice)
    return NativeRouting(workspace(isa, num_threads), described)(scores)


@every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_experts", "num_selected"), [(1, 1), (5, 5), (16, 2), (60, 4), (128, 8), (512, 8)])
def test_the_largest_are_chosen(isa: str, dtype: torch.dtype, num_experts: int, num_selected: int) -> None:
    scores = drawn(33, num_experts).to(dtype)
    for scoring, every in (("softmax", scores.float().softmax(-1)), ("sigmoid", scores.float().sigmoid())):
        weights, ids = routed(scores, isa=isa, num_threads=2, num_selected=num_selected, scoring=scoring)
        torch.testing.assert_close(weights, every.gather(1, ids), rtol=2e-6, atol=1e-30)
        assert torch.equal(ids, every.topk(num_selected).indices)


@every_level
@pytest.mark.parametrize(
    ("num_experts", "num_selected"), [(8, 2), (20, 4), (64, 6), (64, 1), (128, 8), (384, 8), (512, 8), (512, 10)]
)
def test_of_equal_weights_torchs_are_chosen(isa: str, num_experts: int, num_selected: int) -> None:
    """Of sigmoids of large numbers, which are all 1, and of a few different ones."""
    generator = torch.Generator().manual_seed(num_experts + num_selected)
    few = torch.randint(-2, 3, (40, num_experts), generator=generator).float()
    few[20:] = few[20:] * 10 + 30
    _, ids = routed(few, isa=isa, num_selected=num_selected, scoring="sigmoid")
    assert torch.equal(ids, few.sigmoid().topk(num_selected).indices)


def test_of_equal_groups_torchs_are_chosen() -> None:
    few = torch.randint(-1, 2, (200, 24), generator=torch.Generator().manual_seed(0)).float()
    _, ids = routed(few, num_selected=3, scoring="sigmoid", num_groups=6, num_groups_selected=2, group_score_size=2)
    every = few.sigmoid()
    groups = every.view(200, 6, 4).topk(2).values.sum(-1).topk(2).indices
    others = torch.ones(200, 6, dtype=torch.bool).scatter(1, groups, False).repeat_interleave(4, 1)
    assert torch.equal(ids, every.masked_fill(others, -torch.inf).topk(3).indices)


def test_a_token_depends_on_no_other_and_on_no_thread() -> None:
    scores = drawn(300, 60)
    settings: dict[str, Any] = {"num_selected": 4, "renormalize": True, "bias": drawn(1, 60, seed=1)[0] / 9}
    weights, ids = map(torch.cat, zip(*(routed(row[None], **settings) for row in scores), strict=True))
    for num_threads in (1, 2, 5):
        own_weights, own_ids = routed(scores, num_threads=num_threads, **settings)
        assert torch.equal(own_weights, weights)
        assert torch.equal(own_ids, ids)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sparse_mixer"])
def test_a_row_that_is_not_a_number_is_alone(scoring: str) -> None:
    scores = drawn(3, 20)
    good, _ = routed(scores, num_selected=2, scoring=scoring, margin=0.2)
    scores[1, 7] = torch.nan
    weights, ids = routed(scores, num_selected=2, scoring=scoring, margin=0.2)
    assert weights[1].isnan().any()
    assert torch.equal(weights[[0, 2]], good[[0, 2]])
    assert (ids >= 0).all()
    assert (ids < 20).all()


def test_rows_that_lie_apart_and_none() -> None:
    wide = drawn(5, 40)
    weights, ids = routed(wide[:, 3:19], num_selected=2)
    expected_weights, expected_ids = routed(wide[:, 3:19].contiguous(), num_selected=2)
    assert torch.equal(weights, expected_weights)
    assert torch.equal(ids, expected_ids)
    assert routed(wide[:0], num_selected=2)[1].shape == (0, 2)


def test_what_does_not_fit_is_refused() -> None:
    choice = ExpertChoice(num_experts=12, num_selected=4)
    for name, change in (
        ("num_selected", {"num_selected": 13}),
        ("num_groups", {"num_groups": 5}),
        ("num_groups_selected", {"num_groups": 4, "num_groups_selected": 1}),
        ("num_groups_selected", {"num_groups": 4, "num_groups_selected": 5}),
        ("group_score_size", {"num_groups": 4, "num_groups_selected": 2, "group_score_size": 4}),
        ("scoring", {"scoring": "sparse_mixer", "renormalize": True}),
    ):
        with pytest.raises(ConfigError, match=name):
            evolve(choice, **change)
    with pytest.raises(ConfigError, match="bias"):
        NativeRouting(workspace(), evolve(choice, bias=torch.zeros(11)))
    routing = NativeRouting(workspace(), choice)
    for wrong in (torch.zeros(3, 11), torch.zeros(12), torch.zeros(3, 12, dtype=torch.float64)):
        with pytest.raises(ConfigError, match="scores"):
            routing(wrong)

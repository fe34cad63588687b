"""The choice of experts in Triton against torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paged_sdk.kernels.fused_moe import route_reference

pytest.importorskip("triton")


def random_logits(num_tokens: int, num_experts: int) -> Tensor:
    """Draw logits of which no two of a token are alike, not even in bfloat16."""
    generator = torch.Generator().manual_seed(num_experts)
    order = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)])
    return (order - num_experts // 2) / 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "num_selected"), [(1, 1), (8, 2), (60, 4), (128, 8), (256, 16), (5, 5)])
def test_the_likeliest_experts(
    triton_device: torch.device, num_experts: int, num_selected: int, dtype: torch.dtype, *, renormalize: bool
) -> None:
    from paged_sdk.kernels.triton.routing import route

    logits = random_logits(3, num_experts).to(dtype)
    expected, expected_ids = route_reference(logits.double(), num_selected, renormalize=renormalize)
    weights, ids = route(logits.to(triton_device), num_selected, renormalize=renormalize)
    assert weights.dtype is torch.float32
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-5, atol=0)


def test_columns_may_lie_apart(triton_device: torch.device) -> None:
    from paged_sdk.kernels.triton.routing import route

    logits = random_logits(3, 8).to(triton_device)
    apart = logits.T.contiguous().T
    for result, expected in zip(route(apart, 2, renormalize=True), route(logits, 2, renormalize=True), strict=True):
        assert torch.equal(result, expected)


def test_of_equals_the_first_is_chosen(triton_device: torch.device) -> None:
    from paged_sdk.kernels.triton.routing import route

    weights, ids = route(torch.zeros(1, 6, device=triton_device), 3, renormalize=False)
    assert ids.tolist() == [[0, 1, 2]]
    assert weights.tolist() == [[pytest.approx(1 / 6)] * 3]


def test_large_logits(triton_device: torch.device) -> None:
    from paged_sdk.kernels.triton.routing import route

    weights, ids = route(torch.tensor([[1e30, -1e30, 9.9e29, 1e30]], device=triton_device), 2, renormalize=True)
    assert ids.tolist() == [[0, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("bad", [[torch.nan] * 5, [0.0, torch.nan, 1.0, torch.inf, 0.0], [-torch.inf] * 5])
def test_experts_exist_whatever_the_logits(triton_device: torch.device, bad: list[float]) -> None:
    """Each once, and a token's trouble is no other's."""
    from paged_sdk.kernels.triton.routing import route

    logits = random_logits(2, 5)
    logits[0] = torch.tensor(bad)
    weights, ids = route(logits.to(triton_device), 4, renormalize=True)
    assert weights[0].isnan().all()
    chosen = ids[0].tolist()
    assert len(set(chosen)) == 4
    assert set(chosen) <= set(range(5))
    assert weights[1].sum().item() == pytest.approx(1)


def test_experts_that_are_masked_come_last(triton_device: torch.device) -> None:
    from paged_sdk.kernels.triton.routing import route

    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 2.0, -torch.inf]], device=triton_device)
    weights, ids = route(logits, 3, renormalize=True)
    assert ids.tolist() == [[3, 1, 0]]
    assert weights[0, 2] == 0


def test_no_tokens(triton_device: torch.device) -> None:
    from paged_sdk.kernels.triton.routing import route

    weights, ids = route(torch.zeros(0, 8, device=triton_device), 2, renormalize=True)
    assert weights.shape == ids.shape == (0, 2)

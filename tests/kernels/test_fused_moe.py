"""The mixture of experts and its routing, against each token and expert on its own in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from naive_moe import ACTIVATIONS, naive_moe, random_moe
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.fused_moe import fused_moe, route

CPU = torch.device("cpu")

#: Relative to the largest value: products of a few dozen terms, of which gate and up, and down's are rounded.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize(("num_experts", "num_selected"), [(1, 1), (4, 2), (16, 5)])
def test_each_token_gets_its_experts(dtype: torch.dtype, num_tokens: int, num_experts: int, num_selected: int) -> None:
    inputs = random_moe(num_tokens, num_experts, num_selected, dtype=dtype, device=CPU)
    result, expected = fused_moe(*inputs), naive_moe(inputs)
    assert result.dtype is dtype
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=TOLERANCES[dtype] * float(expected.abs().max()))


def test_no_tokens() -> None:
    assert fused_moe(*random_moe(0, 4, 2, dtype=torch.float32, device=CPU)).shape == (0, 24)


def test_an_expert_that_no_token_uses_is_not_read() -> None:
    inputs = random_moe(5, 8, 2, dtype=torch.float32, device=CPU)
    unused = [expert for expert in range(8) if not (inputs.topk_ids == expert).any()]
    assert unused
    expected = fused_moe(*inputs)
    inputs.gate_up[unused] = torch.nan
    inputs.down[unused] = torch.nan
    assert torch.equal(fused_moe(*inputs), expected)


def test_a_token_does_not_depend_on_the_others() -> None:
    """Up to the order of sums, which a matrix product's number of rows decides."""
    inputs = random_moe(20, 4, 2, dtype=torch.float64, device=CPU)
    alone = [
        fused_moe(inputs.hidden[[i]], inputs.gate_up, inputs.down, inputs.topk_weights[[i]], inputs.topk_ids[[i]])
        for i in range(20)
    ]
    torch.testing.assert_close(torch.cat(alone), fused_moe(*inputs), rtol=0, atol=1e-12)


def test_the_sum_over_experts_is_float32() -> None:
    """Sixteen times 1 + 2**-9: added up in bfloat16, the last bits would be gone long before the end."""
    hidden = torch.ones(1, 8, dtype=torch.bfloat16)
    gate_up = torch.ones(16, 2, 8, dtype=torch.bfloat16)
    down = torch.ones(16, 8, 1, dtype=torch.bfloat16)
    weights = torch.full((1, 16), 1 + 2**-9)
    one = float((F.silu(torch.tensor(8.0)).bfloat16() * 8).bfloat16())
    result = fused_moe(hidden, gate_up, down, weights, torch.arange(16)[None])
    assert torch.equal(result, torch.full_like(hidden, one * 16 * (1 + 2**-9)))


def test_the_operator_is_a_good_citizen() -> None:
    for num_tokens in (0, 3):
        inputs = random_moe(num_tokens, 4, 2, dtype=torch.float32, device=CPU)
        torch.library.opcheck(torch.ops.paged_sdk.fused_moe.default, tuple(inputs))


def test_it_exports_for_any_number_of_tokens() -> None:
    class Mixture(torch.nn.Module):
        def forward(self, hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            return fused_moe(hidden, gate_up, down, weights, ids)

    num_tokens = torch.export.Dim("num_tokens")
    by_token = {0: num_tokens}
    exported = torch.export.export(
        Mixture(),
        tuple(random_moe(3, 4, 2, dtype=torch.float32, device=CPU)),
        dynamic_shapes=(by_token, None, None, by_token, by_token),
    )
    more = random_moe(7, 4, 2, dtype=torch.float32, device=CPU)
    assert torch.equal(exported.module()(*more), fused_moe(*more))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(3, 4, 24)}, "hidden.shape"),
        ({"hidden": torch.zeros(3, 24, dtype=torch.int32)}, "hidden.dtype"),
        ({"gate_up": torch.zeros(4, 41, 24)}, r"gate_up.shape = \(4, 41, 24\).*\[4, 40, 24\]"),
        ({"gate_up": torch.zeros(4, 24, 40).transpose(1, 2)}, r"gate_up.stride\(\)"),
        ({"down": torch.zeros(4, 23, 20)}, "down.shape"),
        ({"down": torch.zeros(4, 24, 20, dtype=torch.float16)}, "down.dtype"),
        ({"topk_ids": torch.zeros(2, 2, dtype=torch.int64)}, "topk_ids.shape"),
        ({"topk_ids": torch.tensor([[0, 1], [2, 3], [4, 0]])}, "topk_ids = 4 .* experts 0 to 3"),
        ({"topk_ids": torch.tensor([[0, 1], [2, -1], [0, 0]])}, "topk_ids = -1"),
        ({"topk_weights": torch.zeros(3, 1)}, "topk_weights.shape"),
        ({"topk_weights": torch.zeros(3, 2, dtype=torch.bfloat16)}, "topk_weights.dtype"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    inputs = random_moe(3, 4, 2, dtype=torch.float32, device=CPU)._replace(**changes)
    with pytest.raises(ConfigError, match=message):
        fused_moe(*inputs)


class TestRoute:
    @pytest.mark.parametrize("renormalize", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_it_is_transformers(self, dtype: torch.dtype, renormalize: bool) -> None:
        config = Qwen3MoeConfig(hidden_size=16, num_experts=12, num_experts_per_tok=3, norm_topk_prob=renormalize)
        router_class: Any = Qwen3MoeTopKRouter  # it has no annotations
        router = router_class(config)
        router.weight.data.copy_(torch.randn(12, 16, generator=torch.Generator().manual_seed(0)))
        hidden = torch.randn(50, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
        with torch.no_grad():
            logits, weights, ids = router.to(dtype)(hidden)
        own_weights, own_ids = route(logits, 3, renormalize=renormalize)
        assert torch.equal(own_ids, ids)
        assert own_weights.dtype is torch.float32
        assert torch.equal(own_weights.to(dtype), weights)  # which transformers rounds

    def test_large_logits(self) -> None:
        weights, ids = route(torch.tensor([[1e4, -1e4, 9.9e3, 1e4]]), 2, renormalize=True)
        assert sorted(ids[0].tolist()) == [0, 3]
        assert weights.tolist() == [[0.5, 0.5]]

    def test_the_operator_is_a_good_citizen(self) -> None:
        for dtype in (torch.bfloat16, torch.float64):
            logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
            torch.library.opcheck(torch.ops.paged_sdk.route.default, (logits, 2, True))

    @pytest.mark.parametrize("num_selected", [0, 7])
    def test_what_does_not_fit_is_named(self, num_selected: int) -> None:
        with pytest.raises(ConfigError, match=f"num_selected = {num_selected}.*1 to num_experts = 6"):
            route(torch.zeros(3, 6), num_selected, renormalize=True)
        with pytest.raises(ConfigError, match=r"logits\.shape"):
            route(torch.zeros(6), 2, renormalize=True)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_with_gates_and_without(activation: KernelActivation, is_gated: bool) -> None:
    inputs = random_moe(9, 4, 2, dtype=torch.float64, device=CPU, is_gated=is_gated)
    torch.testing.assert_close(fused_moe(*inputs, activation), naive_moe(inputs, activation), rtol=0, atol=1e-12)


def test_an_unknown_activation() -> None:
    inputs = random_moe(2, 4, 2, dtype=torch.float32, device=CPU)
    with pytest.raises(ConfigError, match=r"activation = .*tanh.*silu or gelu_tanh or relu2"):
        torch.ops.paged_sdk.fused_moe(*inputs, "tanh")

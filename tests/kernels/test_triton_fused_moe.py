"""The Triton kernels of the mixture of experts against each token and expert on its own in float64."""

from __future__ import annotations

import pytest
import torch
from naive_moe import naive_moe, random_moe

from paged_sdk.kernels.activation import KernelActivation

pytest.importorskip("triton")

#: Relative to the largest value. Of halves, activations and each expert's share of the sum are rounded.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

#: Tokens, experts and experts per token: each size of tile, and few pairs; experts without a token, and with one alone.
CASES = {
    "one token": (1, 4, 2),
    "few": (3, 16, 2),
    "three each": (2, 12, 3),
    "one expert": (5, 1, 1),
    "tiles of 16": (9, 8, 3),
    "tiles of 32": (30, 3, 2),
    "tiles of 64": (33, 1, 1),
    "tiles of 128": (90, 2, 2),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES)
def test_each_token_gets_its_experts(triton_device: torch.device, dtype: torch.dtype, case: str) -> None:
    from paged_sdk.kernels.triton.fused_moe import fused_moe

    inputs = random_moe(*CASES[case], dtype=dtype, device=triton_device)
    result, expected = fused_moe(*inputs), naive_moe(inputs)
    assert result.dtype is dtype
    tolerance = TOLERANCES[dtype] * float(expected.abs().max())
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", ["few", "tiles of 16"])
@pytest.mark.parametrize(
    ("activation", "is_gated"), [("gelu_tanh", True), ("relu2", True), ("silu", False), ("relu2", False)]
)
def test_every_activation_with_gates_and_without(
    triton_device: torch.device, activation: KernelActivation, is_gated: bool, case: str
) -> None:
    from paged_sdk.kernels.triton.fused_moe import fused_moe

    inputs = random_moe(*CASES[case], dtype=torch.float32, device=triton_device, is_gated=is_gated)
    result, expected = fused_moe(*inputs, activation), naive_moe(inputs, activation)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("num_tokens", [1, 20])
@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(1, 1), (64, 32), (130, 70), (600, 300)])
def test_any_size_of_matrix(
    triton_device: torch.device, num_tokens: int, hidden_size: int, intermediate_size: int
) -> None:
    """Multiples of a tile, less than one, more than one and a rest."""
    from paged_sdk.kernels.triton.fused_moe import fused_moe

    inputs = random_moe(
        num_tokens,
        4,
        2,
        dtype=torch.float16,
        device=triton_device,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
    )
    result, expected = fused_moe(*inputs), naive_moe(inputs)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=3e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_ids_may_be_int32_and_rows_apart(triton_device: torch.device, num_tokens: int) -> None:
    from paged_sdk.kernels.triton.fused_moe import fused_moe

    inputs = random_moe(num_tokens, 4, 2, dtype=torch.float32, device=triton_device)
    expected = fused_moe(*inputs)
    apart = inputs._replace(
        hidden=inputs.hidden.repeat_interleave(2, dim=0)[::2],
        topk_ids=inputs.topk_ids.int().repeat_interleave(2, dim=1)[:, ::2],
    )
    assert torch.equal(fused_moe(*apart), expected)


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_products_are_not_rounded_before_the_sum(triton_device: torch.device, num_tokens: int) -> None:
    """The same expert twice, with weights that differ by less than halves can tell of products."""
    from paged_sdk.kernels.triton.fused_moe import fused_moe

    inputs = random_moe(num_tokens, 4, 2, dtype=torch.float16, device=triton_device)
    inputs.topk_ids[:, 1] = inputs.topk_ids[:, 0]
    once = inputs._replace(topk_ids=inputs.topk_ids[:, :1], topk_weights=torch.ones_like(inputs.topk_weights[:, :1]))
    inputs.topk_weights[:, 0], inputs.topk_weights[:, 1] = 1.0, -1.0 + 2**-12
    result, whole = fused_moe(*inputs).double(), fused_moe(*once).double()
    torch.testing.assert_close(result, whole * 2**-12, rtol=0, atol=2**-20 * float(whole.abs().max()))


def test_no_tokens(triton_device: torch.device) -> None:
    from paged_sdk.kernels.triton.fused_moe import fused_moe

    assert fused_moe(*random_moe(0, 4, 2, dtype=torch.float32, device=triton_device)).shape == (0, 24)


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_an_expert_that_no_token_uses_is_not_read(triton_device: torch.device, num_tokens: int) -> None:
    from paged_sdk.kernels.triton.fused_moe import fused_moe

    inputs = random_moe(num_tokens, 16, 2, dtype=torch.float32, device=triton_device)
    inputs.topk_ids[:] = inputs.topk_ids % 8 * 2  # two of a token's experts may now be the same, which counts twice
    expected = naive_moe(inputs)
    inputs.gate_up[1::2] = torch.nan
    inputs.down[1::2] = torch.nan
    torch.testing.assert_close(fused_moe(*inputs).double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("num_experts", [1, 5, 16])
@pytest.mark.parametrize("block_m", [16, 64])
def test_pairs_are_sorted_into_tiles_of_one_expert(triton_device: torch.device, num_experts: int, block_m: int) -> None:
    from paged_sdk.kernels.triton.expert_tiles import sort_by_expert

    ids = torch.randint(0, num_experts, (150, 2), generator=torch.Generator().manual_seed(num_experts))
    pairs, tiles = (each.tolist() for each in sort_by_expert(ids.to(triton_device), num_experts, block_m))
    assert sorted(pairs) == list(range(300))
    flat = ids.flatten().tolist()
    rows: list[int] = []
    for expert, first, end in zip(*tiles, strict=True):
        if expert < num_experts:
            own = range(first, min(first + block_m, end))
            assert own
            assert {flat[pairs[row]] for row in own} == {expert}
            rows += own
    assert rows == list(range(300))

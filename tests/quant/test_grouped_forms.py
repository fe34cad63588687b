"""Test which form grouped matrices take on the CPU, against their decoded values."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from attrs import evolve
from torch import Tensor

from grouped_weights import quantized, random_codes
from native_weights import needs_library, workspace
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix
from paged_sdk.quant.dense import DenseLinear
from paged_sdk.quant.dense_experts import DenseExperts
from paged_sdk.quant.embedding import DenseEmbedding
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.native_block import NativeBlockLinear, PackedBlockEmbedding
from paged_sdk.quant.native_block_experts import NativeBlockExperts
from paged_sdk.quant.native_dense import NativeDenseLinear, PackedEmbedding
from paged_sdk.quant.policy import ExpertStack, NamedMatrix, Role, WeightPolicy

pytestmark = needs_library

CPU: Final = torch.device("cpu")
# Activations in int8 by groups of 16.
QUANTIZATION = 0.01
# And weights in int8 by groups of 32, where they have no packed form.
CONVERTED = 0.013


def random(rows: int, cols: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def float8(rows: int, cols: int) -> GroupedMatrix:
    """A matrix of f8e4m3 numbers, one scale per row."""
    weight = random(rows, cols)
    scales = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    levels = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return GroupedMatrix(codes=codes, scales=scales, group_size=cols, levels=levels)


def make(policy: WeightPolicy, matrices: list[GroupedMatrix], role: Role = Role.LINEAR) -> Linear:
    named = [NamedMatrix(str(index), matrix) for index, matrix in enumerate(matrices)]
    return policy.linear(named, [None] * len(named), role, dtype=torch.float32, device=CPU)


def kept() -> WeightPolicy:
    return WeightPolicy(keep_blocks=True, workspace=workspace())


def error(linear: Linear, matrices: list[GroupedMatrix]) -> float:
    """Return the relative error of few rows."""
    x = random(3, matrices[0].shape[1], seed=1)
    expected = x @ torch.cat([matrix.decoded() for matrix in matrices]).T
    return float((linear.forward(x, None) - expected).norm() / expected.norm())


def packed_types(linear: Linear) -> list[str]:
    assert linear.native_weights is not None
    return [weight.format for weight in linear.native_weights.few]


def test_matrices_of_one_order_are_packed_as_they_are_stored() -> None:
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    matrices = [quantized(random(rows, 128), order=order) for rows in (48, 17)]
    linear = make(kept(), matrices)
    assert packed_types(linear) == ["grouped", "grouped"]
    assert error(linear, matrices) < QUANTIZATION
    assert linear.num_bytes < 5.6 * 128 * 80 / 8


def test_other_orders_are_brought_into_the_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(128, generator=generator), torch.randperm(128, generator=generator), None]
    matrices = [quantized(random(48, 128), order=order) for order in orders]
    linear = make(kept(), matrices)
    assert packed_types(linear) == ["Q8_0", "Q8_0", "grouped"]
    assert error(linear, matrices) < CONVERTED


@pytest.mark.parametrize("role", [Role.LINEAR, Role.HEAD])
def test_what_has_no_packed_form_is_converted(role: Role) -> None:
    narrow = random_codes("4 bits", 40, 96, 16, torch.Generator().manual_seed(0))
    for matrix in (float8(40, 96), narrow):
        linear = make(kept(), [matrix], role)
        assert packed_types(linear) == ["Q8_0"]
        assert error(linear, [matrix]) < CONVERTED


def test_of_float8_that_adds_3_percent_to_its_own_error() -> None:
    weight, matrix = random(64, 1024), float8(64, 1024)
    table = kept().embedding(NamedMatrix("embed", matrix), scale=None, dtype=torch.float32, device=CPU)
    own, added = matrix.decoded() - weight, table.forward(torch.arange(64)) - matrix.decoded()
    assert 0.025 < added.square().sum() / own.square().sum() < 0.035


def test_columns_that_fit_no_block_are_decoded() -> None:
    matrix = quantized(random(16, 48), group_size=16)
    assert type(make(kept(), [matrix])) is NativeDenseLinear
    assert type(make(WeightPolicy(keep_blocks=True), [matrix])) is DenseLinear


def test_they_are_decoded_where_they_are_not_to_be_kept_or_there_is_no_library() -> None:
    matrix = NamedMatrix("embed", quantized(random(16, 64)))
    for policy, kind in (
        (WeightPolicy(workspace=workspace()), PackedEmbedding),
        (WeightPolicy(keep_blocks=True), DenseEmbedding),
    ):
        assert type(policy.embedding(matrix, scale=None, dtype=torch.float32, device=CPU)) is kind


def test_a_tied_head_shares_the_embeddings_memory() -> None:
    policy, matrix = kept(), quantized(random(64, 96))
    table = policy.embedding(NamedMatrix("embed", matrix), scale=None, dtype=torch.float32, device=CPU)
    assert isinstance(table, PackedBlockEmbedding)
    torch.testing.assert_close(
        table.forward(torch.tensor([5, 63, 5])), matrix.decoded()[[5, 63, 5]], rtol=0.0, atol=5 * 2.0**-11
    )
    head = policy.tied_head("lm_head", table, dtype=torch.float32, device=CPU)
    assert isinstance(head, NativeBlockLinear)
    assert head.native_weights.few[0] is table.weight
    assert error(head, [matrix]) < QUANTIZATION


@pytest.mark.parametrize("as_stored", [False, True])
def test_experts(as_stored: bool) -> None:
    order = None if as_stored else torch.randperm(64, generator=torch.Generator().manual_seed(0))
    gate, up = ([quantized(random(96, 64, seed), order=order) for seed in seeds] for seeds in ((0, 1), (2, 3)))
    down = [quantized(random(64, 96, seed)) for seed in (4, 5)]
    dense = [[evolve(each) for each in stack] for stack in (gate, up, down)]
    x, ids, shares = random(5, 64, seed=6), torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)
    experts = [
        policy.experts(_stack(gates, ups), _stack(downs), dtype=torch.float32, device=CPU)
        for policy, (gates, ups, downs) in ((kept(), (gate, up, down)), (WeightPolicy(), dense))
    ]
    assert [type(each) for each in experts] == [NativeBlockExperts, DenseExperts]
    weights = experts[0].native_weights
    assert weights is not None
    assert weights.gate is not None
    assert weights.gate.format == ("grouped" if as_stored else "Q8_0")
    got, expected = (each.forward(x, shares, ids) for each in experts)
    assert (got - expected).norm() / expected.norm() < 2 * CONVERTED


def _stack(*projections: list[GroupedMatrix]) -> ExpertStack:
    return ExpertStack(
        matrices=[
            [NamedMatrix(f"{expert}.{index}", each) for index, each in enumerate(of_expert)]
            for expert, of_expert in enumerate(zip(*projections, strict=True))
        ]
    )

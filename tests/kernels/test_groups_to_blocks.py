"""Test grouped matrices in GGUF's blocks, and the products with them that GPUs compute."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from torch import Tensor

from grouped_weights import every_kind, quantized, random_codes
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix
from paged_sdk.kernels.quantized.groups_to_blocks import as_blocks
from paged_sdk.quant.form import Form
from paged_sdk.quant.forms.triton_blocks import TritonBlocks
from paged_sdk.quant.policy import ExpertStack, NamedMatrix, Role, WeightPolicy


class EverywhereTritonBlocks(TritonBlocks):
    """Serves CPU tensors too, on which Triton's interpreter runs the kernels."""

    def is_for(self, device: torch.device) -> bool:
        return True


def make(kind: str, rows: int = 6, cols: int = 96, group_size: int = 32) -> GroupedMatrix:
    return random_codes(kind, rows, cols, group_size, torch.Generator().manual_seed(cols))


def symmetric(matrix: GroupedMatrix) -> GroupedMatrix:
    """Return 8 bits with a zero point of 128, as those of GPTQ are."""
    return evolve(matrix, minima=-128 * matrix.scales)


@every_kind
@pytest.mark.parametrize(("cols", "group_size"), [(96, 32), (128, 64), (320, 128), (64, 1000)])
def test_values_are_kept(kind: str, cols: int, group_size: int) -> None:
    matrix = make(kind, 6, cols, group_size)
    if kind in ("6 bits", "7 bits", "8 bits"):
        assert as_blocks(matrix) is None
        if kind != "8 bits":
            return
        matrix = symmetric(matrix)
    blocks = as_blocks(matrix)
    assert blocks is not None
    assert blocks.tensor_type == {"5 bits": 7, "8 bits": 8, "int8": 8, "nf4": 8, "e2m1": 8}.get(kind, 3)
    expected = matrix.decoded()
    # Minima become float16; levels int8.
    bound = 2.0**-11 * 31 * matrix.scales.abs().max() + (0.6 / 124 if kind == "nf4" else 2e-3) * expected.abs().max()
    assert (blocks.decoded() - expected).abs().max() <= bound
    if kind == "int8":
        assert torch.equal(blocks.decoded(), expected)


@pytest.mark.parametrize(
    "matrix",
    [
        evolve(make("4 bits"), order=torch.randperm(96, generator=torch.Generator().manual_seed(0))),
        make("4 bits", cols=48),
        make("4 bits", group_size=16),
        evolve(make("4 bits"), scales=torch.full((6, 3), 1e6)),
        evolve(make("4 bits"), scales=torch.full((6, 3), 1e-8)),
        evolve(make("4 bits"), scales=torch.full((6, 3), torch.nan)),
    ],
    ids=["order", "columns", "group", "large", "small", "not finite"],
)
def test_what_does_not_fit(matrix: GroupedMatrix) -> None:
    assert as_blocks(matrix) is None


@pytest.mark.parametrize("kind", ["4 bits", "nf4"])
def test_products_and_embeddings(kind: str, triton_device: torch.device) -> None:
    forms: list[Form] = [EverywhereTritonBlocks()]
    policy = WeightPolicy(keep_blocks=True, forms=forms)
    matrices = [make(kind, rows, 64, 64) for rows in (8, 3)]
    named = [NamedMatrix(str(index), each) for index, each in enumerate(matrices)]
    linear = policy.linear(named, [None, None], Role.LINEAR, dtype=torch.float32, device=triton_device)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    expected = x @ torch.cat([each.decoded() for each in matrices]).T
    assert relative(linear.forward(x.to(triton_device), None), expected) < 6e-3
    assert linear.num_bytes < 11 * 64 * (1.07 if kind == "nf4" else 0.76)
    table = policy.embedding(named[0], scale=None, dtype=torch.float32, device=triton_device)
    rows = torch.tensor([7, 0])
    assert relative(table.forward(rows.to(triton_device)), matrices[0].decoded()[rows]) < 6e-3
    head = policy.tied_head("lm_head", table, dtype=torch.float32, device=triton_device)
    assert relative(head.forward(x.to(triton_device), None), x @ matrices[0].decoded().T) < 6e-3


def test_experts(triton_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    gate, up, down = ([quantized(torch.randn(32, 32, generator=generator)) for _ in range(2)] for _ in range(3))
    policies = WeightPolicy(keep_blocks=True, forms=[EverywhereTritonBlocks()]), WeightPolicy()
    made = [
        policy.experts(_stack(gate, up), _stack(down), dtype=torch.float32, device=triton_device) for policy in policies
    ]
    assert type(made[0]) is not type(made[1])
    x, ids, shares = torch.randn(1, 32, generator=generator), torch.tensor([[0, 1]]), torch.full((1, 2), 0.5)
    got, expected = (each.forward(*(part.to(triton_device) for part in (x, shares, ids))) for each in made)
    assert relative(got, expected.cpu()) < 6e-3


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.cpu() - expected).norm() / expected.norm())


def _stack(*projections: list[GroupedMatrix]) -> ExpertStack:
    return ExpertStack(
        matrices=[
            [NamedMatrix(f"{expert}.{index}", each) for index, each in enumerate(of_expert)]
            for expert, of_expert in enumerate(zip(*projections, strict=True))
        ]
    )

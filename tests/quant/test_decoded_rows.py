"""Linear layers' weights as numbers, from every form on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import pytest
import torch
from torch import Tensor

from native_weights import needs_library, workspace
from paged_sdk.config.isq import IsqType
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.quant.adapted import AdaptableLinear
from paged_sdk.quant.dense import DenseLinear
from paged_sdk.quant.form import Place, find_forms
from paged_sdk.quant.hadamard_int8 import HadamardInt8Linear
from paged_sdk.quant.isq import quantize
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.side_by_side import SideBySideLinear

CPU: Final = torch.device("cpu")
HEIGHTS: Final = (272, 32)  # more than are decoded at once


def weight(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed)) * 0.1


def native(matrices: Sequence[StoredMatrix], biases: Sequence[Tensor | None], dtype: torch.dtype) -> Linear:
    place = Place(device=CPU, dtype=dtype, workspace=workspace(), one_form=False)
    made = (form.linear(matrices, biases, place, is_head=False) for form in find_forms())
    return next(linear for linear in made if linear is not None)


def dense(dtype: torch.dtype) -> tuple[list[StoredMatrix], torch.dtype]:
    return [DenseMatrix(weight(rows, rows).to(dtype)) for rows in HEIGHTS], dtype


def quantized(isq: IsqType) -> tuple[list[StoredMatrix], torch.dtype]:
    return [quantize(weight(rows, rows), isq, None) for rows in HEIGHTS], torch.float32


@needs_library
@pytest.mark.parametrize(
    "make",
    [
        lambda: dense(torch.float32),
        lambda: dense(torch.bfloat16),
        lambda: quantized(IsqType.Q4K),
        lambda: quantized(IsqType.AFQ4),
    ],
    ids=["float32", "bfloat16", "blocks", "groups"],
)
def test_native_forms(make: Callable[[], tuple[list[StoredMatrix], torch.dtype]]) -> None:
    matrices, dtype = make()
    bias = torch.randn(HEIGHTS[0]).to(dtype)
    linear = AdaptableLinear(native(matrices, [bias, None], dtype), "layer")
    expected = torch.cat([matrix.decoded() for matrix in matrices])
    check(linear, expected, torch.cat([bias.float(), torch.zeros(HEIGHTS[1])]), tolerance=1e-4)


def test_forms_of_torch() -> None:
    first, second = (weight(rows, rows) for rows in HEIGHTS)
    bias = torch.randn(HEIGHTS[0])
    linear = SideBySideLinear([DenseLinear(first, bias), DenseLinear(second)])
    check(linear, torch.cat([first, second]), torch.cat([bias, torch.zeros(HEIGHTS[1])]), tolerance=0.0)


def test_forms_that_only_multiply() -> None:
    """Of int8 weights, what unit vectors give is what they multiply by."""
    matrix = quantize(weight(HEIGHTS[0], 0), IsqType.Q8_0, None)
    assert isinstance(matrix, BlockMatrix)
    bias = torch.randn(HEIGHTS[0])
    check(HadamardInt8Linear([matrix], [bias]), matrix.decoded(), bias, tolerance=0.02)


def check(linear: Linear, expected: Tensor, biases: Tensor, *, tolerance: float) -> None:
    parts = list(linear.decoded(CPU))
    assert [part.first for part in parts] == [0, *torch.tensor([len(p.weight) for p in parts]).cumsum(0)[:-1].tolist()]
    found = torch.cat([part.weight for part in parts])
    assert found.dtype == torch.float32
    assert (found - expected).norm() <= tolerance * expected.norm()
    assert torch.allclose(torch.cat([part.bias for part in parts]), biases, atol=1e-6)

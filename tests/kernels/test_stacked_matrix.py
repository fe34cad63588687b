"""Matrices whose rows lie in several others."""

from __future__ import annotations

import pytest
import torch

from paged_sdk.config.isq import IsqType
from paged_sdk.errors import UnsupportedQuantizationError
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.kernels.quantized.stacked_matrix import StackedMatrix
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.quant.isq import quantize

HEIGHTS = (3, 1, 5)
COLS = 64


@pytest.fixture(scope="module")
def values() -> torch.Tensor:
    return torch.randn(sum(HEIGHTS), COLS, generator=torch.Generator().manual_seed(0))


def parts_of(values: torch.Tensor) -> list[StoredMatrix]:
    return [DenseMatrix(part) for part in torch.split(values, list(HEIGHTS))]


@pytest.mark.parametrize("first", range(10))
@pytest.mark.parametrize("count", range(10))
def test_rows(values: torch.Tensor, first: int, count: int) -> None:
    rows = StackedMatrix(parts_of(values)).rows(slice(first, first + count))
    expected = values[first : first + count]
    assert rows.shape == expected.shape
    assert torch.equal(rows.decoded(), expected)
    assert rows.num_bytes == expected.nbytes


def test_rows_of_rows_and_columns(values: torch.Tensor) -> None:
    stack = StackedMatrix(parts_of(values))
    assert torch.equal(stack.rows(slice(2, 8)).rows(slice(1, 4)).decoded(), values[3:6])
    assert torch.equal(stack.cols(slice(5, 9)).rows(slice(2, None)).decoded(), values[2:, 5:9])
    assert torch.equal(stack.to(torch.device("cpu")).decoded(torch.bfloat16), values.bfloat16())


def test_whole_matrices_are_those_that_were_given(values: torch.Tensor) -> None:
    parts = parts_of(values)
    stack = StackedMatrix(parts)
    assert [stack.rows(slice(0, 3)), stack.rows(slice(3, 4)), stack.rows(slice(4, 9))] == parts


def test_forms_may_differ(values: torch.Tensor) -> None:
    """Rows of a quantized matrix stay quantized."""
    dense, other, last = parts_of(values)
    packed = quantize(last.decoded(), IsqType.Q8_0, None)
    stack = StackedMatrix([dense, other, packed])
    assert not stack.is_dense
    assert stack.rows(slice(0, 4)).is_dense
    assert isinstance(stack.rows(slice(6, 8)), BlockMatrix)
    assert torch.equal(stack.decoded(), torch.cat([values[:4], packed.decoded()]))
    with pytest.raises(UnsupportedQuantizationError):
        stack.cols(slice(1, 40))

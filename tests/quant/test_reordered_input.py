"""Matrices whose columns or rows are stored in another order: as stored, beside what they stand for."""

from __future__ import annotations

import pytest
import torch

from native_weights import needs_library, random_matrix, workspace
from paged_sdk.config.isq import IsqType
from paged_sdk.errors import UnsupportedQuantizationError
from paged_sdk.kernels.quantized.reordered_matrix import JoinedMatrix, ReorderedColumns
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix
from paged_sdk.quant.policy import NamedMatrix, Role, WeightPolicy
from paged_sdk.quant.reordered_input import ReorderedInputLinear

CPU = torch.device("cpu")
Q4_K, Q6_K = 12, 14
ORDER = torch.tensor([2, 0, 3, 1])


def reordered() -> ReorderedColumns:
    """Make a matrix of 24 rows, and of four groups of 64 columns that one block spans."""
    return ReorderedColumns(random_matrix(Q4_K, 24, 256, torch.Generator().manual_seed(0)), ORDER, 64)


def meant(matrix: ReorderedColumns) -> torch.Tensor:
    values = torch.empty(24, 4, 64)
    values[:, ORDER] = matrix.stored.decoded().view(24, 4, 64)
    return values.flatten(1)


def test_columns_are_decoded_to_their_places() -> None:
    matrix = reordered()
    values = meant(matrix)
    assert matrix.shape == (24, 256)
    assert not matrix.is_dense
    assert torch.equal(matrix.decoded(), values)
    assert torch.equal(matrix.rows(slice(3, 9)).to(CPU).decoded(), values[3:9])
    assert matrix.cols(slice(0, 256)) is matrix
    with pytest.raises(UnsupportedQuantizationError, match="columns 0 to 64"):
        matrix.cols(slice(0, 64))


@needs_library
def test_the_input_is_reordered_where_blocks_are_kept() -> None:
    matrix, x = reordered(), torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    expected = x @ meant(matrix).T
    bias = torch.arange(24.0)
    named = NamedMatrix("m", matrix)
    kept = WeightPolicy(keep_blocks=True, workspace=workspace()).linear(
        [named], [bias], Role.LINEAR, dtype=torch.float32, device=CPU
    )
    assert isinstance(kept, ReorderedInputLinear)
    assert kept.num_bytes < 2 * 24 * 256
    found = kept.forward(x, None) - bias
    assert (found - expected).norm() < 0.02 * expected.norm()  # activations of 8 bits
    rows = list(kept.decoded(CPU))
    assert torch.equal(torch.cat([each.bias for each in rows]), bias)
    weight = torch.cat([each.weight for each in rows])
    assert (weight - meant(matrix)).norm() < 0.02 * meant(matrix).norm()
    for policy in (WeightPolicy(), WeightPolicy(isq=IsqType.Q8_0, workspace=workspace())):
        other = policy.linear([named], [None], Role.LINEAR, dtype=torch.float32, device=CPU)
        assert not isinstance(other, ReorderedInputLinear)
        assert (other.forward(x, None) - expected).norm() < 0.02 * expected.norm()


def test_rows_of_several_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [random_matrix(Q4_K, 6, 256, generator), random_matrix(Q6_K, 4, 256, generator)]
    order = torch.randperm(10, generator=generator)
    matrix = JoinedMatrix(parts, order)
    values = torch.cat([part.decoded() for part in parts])[order]
    assert matrix.shape == (10, 256)
    assert matrix.num_bytes == sum(part.num_bytes for part in parts)
    assert not matrix.is_dense
    assert JoinedMatrix([DenseMatrix(values)], order).is_dense
    assert torch.equal(matrix.decoded(), values)
    assert torch.equal(matrix.rows(slice(2, 5)).to(CPU).decoded(), values[2:5])
    back = order.argsort()
    whole = matrix.whole_parts(back, [6, 4])
    assert whole is not None
    assert all(found is part for found, part in zip(whole, parts, strict=True))
    assert matrix.whole_parts(back, [5, 5]) is None
    assert matrix.whole_parts(back.flip(0), [4, 6]) is None

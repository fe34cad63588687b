"""Test the one class of codes with scales for groups of columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix, UnreadGroupedMatrix
from paged_sdk.quant.policy import NamedMatrix, Role, WeightPolicy

_CPU = torch.device("cpu")


def _matrix(
    rows: int = 6,
    cols: int = 40,
    group_size: int = 16,
    *,
    levels: bool = False,
    minima: bool = True,
    order: bool = False,
) -> GroupedMatrix:
    """Make a matrix of 4-bit codes; by default a row's last group is short."""
    torch.manual_seed(rows * cols)
    groups = -(-cols // group_size)
    return GroupedMatrix(
        codes=torch.randint(16, (rows, cols), dtype=torch.uint8),
        scales=torch.rand(rows, groups) + 0.5,
        minima=torch.randn(rows, groups) if minima else None,
        group_size=group_size,
        levels=torch.randn(16) if levels else None,
        order=torch.randperm(cols) if order else None,
        bits=4,
    )


def _by_definition(matrix: GroupedMatrix) -> Tensor:
    rows, cols = matrix.shape
    values = torch.full((rows, cols), float("nan"))
    for row in range(rows):
        for col in range(cols):
            code, group = int(matrix.codes[row, col]), col // matrix.group_size
            number = torch.tensor(float(code)) if matrix.levels is None else matrix.levels[code]
            value = matrix.scales[row, group] * number
            if matrix.minima is not None:
                value = value + matrix.minima[row, group]
            values[row, col if matrix.order is None else int(matrix.order[col])] = value
    return values


@pytest.mark.parametrize("group_size", [16, 20, 40, 1000])
@pytest.mark.parametrize("levels", [False, True])
@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize("order", [False, True])
def test_decodes_by_definition(group_size: int, levels: bool, minima: bool, order: bool) -> None:
    matrix = _matrix(group_size=group_size, levels=levels, minima=minima, order=order)
    expected = _by_definition(matrix)
    assert torch.equal(matrix.decoded(), expected)
    assert torch.equal(matrix.decoded(torch.bfloat16), expected.bfloat16())
    assert not matrix.is_dense


def test_large_matrices_are_decoded_in_parts() -> None:
    matrix = _matrix(1100, 1024, 128, order=True)
    assert matrix.order is not None
    expected = matrix.codes.float().view(1100, 8, 128) * matrix.scales[:, :, None]
    assert matrix.minima is not None
    assert torch.equal(matrix.decoded()[:, matrix.order], (expected + matrix.minima[:, :, None]).view(1100, 1024))


def test_rows_and_columns_are_those_of_the_values() -> None:
    matrix = _matrix()
    values = matrix.decoded()
    assert torch.equal(matrix.rows(slice(2, 5)).decoded(), values[2:5])
    assert torch.equal(matrix.cols(slice(16, 40)).decoded(), values[:, 16:])
    assert torch.equal(torch.cat([part.decoded() for part in matrix.parts(4)]), values)
    assert matrix.rows(slice(2, 5)).codes.untyped_storage().data_ptr() == matrix.codes.untyped_storage().data_ptr()
    assert matrix.to(_CPU) is matrix
    assert matrix.to(torch.device("meta")).decoded().shape == (6, 40)


def test_columns_of_part_of_a_group_are_refused() -> None:
    with pytest.raises(
        UnsupportedQuantizationError, match="columns 0 to 8 of a grouped 4-bit matrix cut a group of 16"
    ):
        _matrix().cols(slice(0, 8))
    with pytest.raises(UnsupportedQuantizationError, match="order of the input"):
        _matrix(order=True).cols(slice(0, 16))
    whole = _matrix(order=True)
    assert whole.cols(slice(None)) is whole


def test_bits_come_from_levels_or_codes() -> None:
    codes, scales = torch.full((2, 8), 5, dtype=torch.uint8), torch.ones(2, 1)
    assert GroupedMatrix(codes=codes, scales=scales, group_size=8).bits == 3
    assert GroupedMatrix(codes=codes, scales=scales, group_size=8, levels=torch.randn(16)).bits == 4
    claimed = GroupedMatrix(codes=codes | 16, scales=scales, group_size=8, bits=4)
    assert torch.equal(claimed.decoded(), torch.full((2, 8), 5.0))
    assert claimed.num_bytes == 2 * (4 + 2)
    assert evolve(claimed, minima=torch.zeros(2, 1)).num_bytes == 2 * (4 + 4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"codes": torch.zeros(6, 40)}, r"codes of a grouped matrix are torch.float32 \[6, 40\]: expected torch.uint8"),
        ({"codes": torch.zeros(6, dtype=torch.uint8)}, "expected two dimensions"),
        ({"scales": torch.ones(6, 2)}, r"scales .* \[6, 2\]: expected torch.float32 \[6, 3\]"),
        ({"minima": torch.ones(6, 3).double()}, r"minima .* torch.float64 \[6, 3\]"),
        ({"levels": torch.ones(15)}, r"levels .* \[15\]: expected torch.float32 \[16\]"),
        ({"order": torch.arange(39)}, r"order .* \[39\]: expected torch.int64 \[40\]"),
        ({"order": torch.zeros(40, dtype=torch.int64)}, "40 columns does not name each of them once"),
        ({"order": torch.arange(1, 41)}, "40 columns does not name each of them once"),
        ({"group_size": 0}, "0 columns"),
        ({"bits": 9}, "9 bits"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        evolve(_matrix(), **changed)


def _unread(matrix: GroupedMatrix, seen: list[tuple[int, int]]) -> UnreadGroupedMatrix:
    def read(first: int, last: int) -> GroupedMatrix:
        seen.append((first, last))
        return matrix.rows(slice(first, last))

    return UnreadGroupedMatrix(
        shape=matrix.shape,
        read=read,
        group_size=matrix.group_size,
        has_minima=matrix.has_minima,
        bits=matrix.bits,
        levels=matrix.levels,
        order=matrix.order,
    )


def test_unread_rows_are_read_when_they_are_asked_for() -> None:
    matrix, seen = _matrix(order=True), list[tuple[int, int]]()
    unread, values = _unread(matrix, seen), matrix.decoded()
    part = unread.rows(slice(1, 5)).rows(slice(1, 3))
    assert (part.shape, part.num_bytes, unread.num_bytes) == ((2, 40), matrix.num_bytes // 3, matrix.num_bytes)
    assert not seen
    assert torch.equal(part.decoded(), values[2:4])
    assert seen == [(2, 4)]
    assert [each.shape[0] for each in unread.parts(4)] == [4, 2]
    assert seen[1:] == [(0, 4), (4, 6)]
    assert torch.equal(unread.to(_CPU).decoded(), values)
    assert unread.cols(slice(None)).shape == (6, 40)


def test_what_is_read_has_to_be_what_was_announced() -> None:
    unread = evolve(_unread(_matrix(), []), group_size=20)
    with pytest.raises(CheckpointError, match="was read as"):
        unread.matrix()


@pytest.mark.parametrize("keep_blocks", [False, True])
def test_policy_multiplies_by_the_decoded_values(keep_blocks: bool) -> None:
    """Columns that are no multiple of 32 fit no packed form, so both are decoded."""
    matrix = _matrix(order=True)
    policy = WeightPolicy(keep_blocks=keep_blocks)
    named = [NamedMatrix("q", matrix), NamedMatrix("k", _unread(matrix, []))]
    linear = policy.linear(named, [None, None], Role.LINEAR, dtype=torch.float32, device=_CPU)
    x = torch.randn(3, 40)
    expected = x @ matrix.decoded().T
    torch.testing.assert_close(linear.forward(x, None), torch.cat((expected, expected), dim=1))
    table = policy.embedding(NamedMatrix("embed", matrix), scale=None, dtype=torch.float32, device=_CPU)
    assert torch.equal(table.forward(torch.tensor([5, 0])), matrix.decoded()[[5, 0]])

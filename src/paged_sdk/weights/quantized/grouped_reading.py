"""Make grouped matrices from parts that the formats share: rows of packed codes, grids of scales, tables of levels."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix, UnreadGroupedMatrix
from paged_sdk.kernels.quantized.packed_codes import CodeForm, PackedCodes
from paged_sdk.kernels.quantized.stored_matrix import UnreadRows
from paged_sdk.weights.quantized.packed_tensors import PackedTensors

__all__ = [
    "E8M0",
    "ScaleGrid",
    "e2m1_levels",
    "find_grid",
    "grouped_rows",
    "groups_of_columns",
    "order_of_columns",
    "powers_of_two",
]

E8M0 = (torch.uint8, torch.float8_e8m0fnu)
"""The dtypes of stored power-of-two scales (E8M0: an 8-bit exponent)."""


def e2m1_levels() -> Tensor:
    """Return the values of all 16 codes of FP4 E2M1 (sign, two exponent bits, one mantissa bit), float32."""
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32)
    return torch.cat((positive, -positive))


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return the powers of two, float32, of exponents with a bias of 127."""
    return exponents.view(torch.float8_e8m0fnu).float()


def grouped_rows(
    packed: UnreadRows,
    form: CodeForm,
    cols: int,
    scales: Tensor,
    *,
    bits: int,
    group_size: int,
    minima: Tensor | None = None,
    levels: Tensor | None = None,
    order: Tensor | None = None,
) -> UnreadGroupedMatrix:
    """Return a matrix whose codes are stored row by row in a file, and read on demand.

    Other parameters are those of :class:`GroupedMatrix`.

    :param packed: the rows of packed codes
    :param form: how codes are packed; not a form in which they run down columns
    :param scales: float32 ``[rows, groups]``
    :param order: the order to bring each row's codes into
    """

    def read(first: int, last: int) -> GroupedMatrix:
        words = packed[first:last].tensor()
        codes = PackedCodes(words=words, form=form, shape=(last - first, cols), bits=bits)
        return GroupedMatrix(
            codes=codes if order is None else codes.bytes()[:, order],
            scales=scales[first:last],
            minima=None if minima is None else minima[first:last],
            group_size=group_size,
            levels=levels,
            order=order,
            bits=bits,
        )

    return UnreadGroupedMatrix(
        shape=(packed.shape[0], cols),
        read=read,
        group_size=group_size,
        has_minima=minima is not None,
        bits=bits,
        levels=levels,
        order=order,
    )


@frozen
class ScaleGrid:
    """Says which weights of a matrix share a scale.

    :ivar shape: rows and columns of the matrix
    :ivar rows: how many consecutive rows share a scale; ``cols`` likewise
    """

    shape: tuple[int, int]
    rows: int
    cols: int

    def spread(self, scales: Tensor) -> Tensor:
        """Expand the stored scales, of any dtype, to float32 ``[rows, groups]``."""
        rows, cols = self.shape
        groups = -(-cols // self.cols)
        grid = scales.float().reshape(-1, groups)
        if len(grid) == 1:
            return grid.expand(rows, groups)
        return grid.repeat_interleave(self.rows, 0)[:rows] if self.rows > 1 else grid


def find_grid(
    tensors: PackedTensors,
    suffix: str,
    dtypes: Collection[torch.dtype],
    shape: tuple[int, int],
    blocks: Iterable[tuple[int, int]] = (),
) -> ScaleGrid:
    """Infer from the shape of the scales whether there is one per matrix, per row, or per block.

    :param blocks: the possible block shapes (rows, columns)
    :raises CheckpointError: the tensor is missing, or has another dtype or shape
    """
    rows, cols = shape
    whole, row = (max(1, rows), max(1, cols)), (1, max(1, cols))
    possible: dict[tuple[int, ...], tuple[int, int]] = {
        (-(-rows // high), -(-cols // wide)): (high, wide) for high, wide in blocks
    }
    possible |= {(rows, 1): row, (rows,): row, (1, 1): whole, (1,): whole, (): whole}
    tensors.check(suffix, dtypes, *possible)
    return ScaleGrid(shape, *possible[tensors.source.shape(tensors.prefix + suffix)])


def groups_of_columns(tensors: PackedTensors, suffix: str, cols: int, groups: int) -> Tensor:
    """Read the group index of each column, int64 ``[cols]``.

    :raises CheckpointError: the tensor is missing or malformed, or an index is out of range
    """
    named = tensors.tensor(suffix, (torch.int32, torch.int64), (cols,)).long()
    if cols and not 0 <= int(named.min()) <= int(named.max()) < groups:
        raise tensors.error(suffix, f"names groups outside of the {groups} there are")
    return named


def order_of_columns(group_of: Tensor, group_size: int) -> tuple[Tensor | None, bool]:
    """Return the order of columns that makes each group contiguous.

    :returns: the order, int64, or None if groups are contiguous already; and whether each group then has ``group_size``
        columns, the last one at most
    """
    in_order = torch.arange(len(group_of)) // group_size
    if torch.equal(group_of, in_order):
        return None, True
    order = torch.argsort(group_of, stable=True)
    return order, torch.equal(group_of[order], in_order)

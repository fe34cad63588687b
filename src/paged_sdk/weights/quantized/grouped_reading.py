"""Make grouped matrices of what the formats have in common: rows of packed codes, grids of scales, tables of levels."""

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
"""The element types that exponents are stored in."""


def e2m1_levels() -> Tensor:
    """Return what the codes of 4-bit floating point numbers stand for: sign, two bits of exponent, one of mantissa."""
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.cat((positive, -positive))


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return float32 powers of two, of exponents that are stored with 127 added."""
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
    """Return a matrix whose codes lie in a file row by row, and are read when they are asked for.

    :param form: how they lie, which is not down columns
    :param scales: float32 ``[rows, groups]``; the others are as :class:`GroupedMatrix` has them
    :param order: the codes of a row are brought into this order
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
    """Says which weights share a scale.

    :ivar shape: rows and columns of the matrix
    :ivar rows: that share a scale, ``cols`` likewise
    """

    shape: tuple[int, int]
    rows: int
    cols: int

    def spread(self, scales: Tensor) -> Tensor:
        """Return scales of any type, float32 ``[rows, groups]``."""
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
    """Find out what each scale is for, by their number: one for all, one for each row, or one for each of some blocks.

    :param blocks: the rows and columns that blocks may have
    :raises CheckpointError: the tensor is missing, or has another type or shape
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
    """Read the number of each column's group, int64 ``[cols]``.

    :raises CheckpointError: there is no such group
    """
    named = tensors.tensor(suffix, (torch.int32, torch.int64), (cols,)).long()
    if cols and not 0 <= int(named.min()) <= int(named.max()) < groups:
        raise tensors.error(suffix, f"names groups outside of the {groups} there are")
    return named


def order_of_columns(group_of: Tensor, group_size: int) -> tuple[Tensor | None, bool]:
    """Return the order in which the columns of a group are neighbours; None: they are.

    :returns: the order, and whether all groups have their size then
    """
    in_order = torch.arange(len(group_of)) // group_size
    if torch.equal(group_of, in_order):
        return None, True
    order = torch.argsort(group_of, stable=True)
    return order, torch.equal(group_of[order], in_order)

"""Define stored matrices whose rows or columns the checkpoint holds in another order than the model's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.errors import UnsupportedQuantizationError
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix, bounds

__all__ = ["JoinedMatrix", "ReorderedColumns"]


@frozen(eq=False)
class JoinedMatrix:
    """Holds the rows of several matrices, in any order; it is a
    :class:`~paged_sdk.kernels.quantized.stored_matrix.StoredMatrix`. The matrices may be quantized differently.

    :ivar parts: matrices of one width
    :ivar order: int64 ``[rows]``: for each row, its index in the matrices stacked vertically
    """

    parts: Sequence[StoredMatrix]
    order: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and columns."""
        return len(self.order), self.parts[0].shape[1]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all rows of the matrices."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def is_dense(self) -> bool:
        """Return whether all of the matrices are dense."""
        return all(part.is_dense for part in self.parts)

    def rows(self, index: slice) -> StoredMatrix:
        """See :meth:`StoredMatrix.rows`; the rows of one of the matrices are that matrix."""
        first, last = bounds(index, len(self.order))
        whole = self.whole_parts(torch.arange(first, last), [last - first])
        return evolve(self, order=self.order[first:last]) if whole is None else whole[0]

    def cols(self, index: slice) -> JoinedMatrix:
        """See :meth:`StoredMatrix.cols`."""
        return evolve(self, parts=[part.cols(index) for part in self.parts])

    def to(self, device: torch.device) -> JoinedMatrix:
        """See :meth:`StoredMatrix.to`."""
        return JoinedMatrix([part.to(device) for part in self.parts], self.order.to(device))

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """See :meth:`StoredMatrix.decoded`."""
        return torch.cat([part.decoded(dtype) for part in self.parts])[self.order]

    def whole_parts(self, order: Tensor, heights: Sequence[int]) -> list[StoredMatrix] | None:
        """Return a permutation of the rows as the matrices that they come from.

        :param order: indices of rows
        :param heights: how many of these rows each result has
        :returns: None if a result is not one of :attr:`parts`, with its rows in their own order
        """
        ends = list(accumulate(part.shape[0] for part in self.parts))
        found: list[StoredMatrix] = []
        for rows in torch.split(self.order[order], list(heights)):
            known = zip(self.parts, ends, strict=True)
            whole = (part for part, end in known if torch.equal(rows, torch.arange(end - part.shape[0], end)))
            if (part := next(whole, None)) is None:
                return None
            found.append(part)
        return found


@frozen(eq=False)
class ReorderedColumns:
    """Holds a quantized matrix whose columns are stored in another order; it is a
    :class:`~paged_sdk.kernels.quantized.stored_matrix.StoredMatrix`. A block of it has columns that lie apart in the
    model's order, so that without decoding only the input can be reordered.

    :ivar stored: the matrix as the checkpoint stores it
    :ivar order: int64: for each group of stored columns, which group of the model's it is
    :ivar width: columns of a group
    """

    stored: StoredMatrix
    order: Tensor
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and columns."""
        return self.stored.shape

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the stored matrix."""
        return self.stored.num_bytes

    @property
    def is_dense(self) -> bool:
        """Return whether the stored matrix is dense."""
        return self.stored.is_dense

    def rows(self, index: slice) -> ReorderedColumns:
        """See :meth:`StoredMatrix.rows`."""
        return evolve(self, stored=self.stored.rows(index))

    def cols(self, index: slice) -> ReorderedColumns:
        """See :meth:`StoredMatrix.cols`: every cut but that of all columns is one through blocks."""
        if bounds(index, self.shape[1]) == (0, self.shape[1]):
            return self
        first, last = bounds(index, self.shape[1])
        raise UnsupportedQuantizationError(f"columns {first} to {last} are parts of blocks that are in another order")

    def to(self, device: torch.device) -> ReorderedColumns:
        """See :meth:`StoredMatrix.to`."""
        return evolve(self, stored=self.stored.to(device), order=self.order.to(device))

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """See :meth:`StoredMatrix.decoded`."""
        values = torch.unflatten(self.stored.decoded(dtype), 1, (-1, self.width))
        return values[:, self.order.argsort()].flatten(1)

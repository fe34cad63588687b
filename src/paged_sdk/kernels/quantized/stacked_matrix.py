"""Define a stored matrix whose rows lie in several others, one after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
from attrs import field, frozen
from torch import Tensor

from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix, bounds

__all__ = ["StackedMatrix"]


@frozen(eq=False)
class StackedMatrix:
    """Holds the rows of several matrices, in order; it is a
    :class:`~paged_sdk.kernels.quantized.stored_matrix.StoredMatrix`. The matrices may be quantized differently.

    :ivar parts: matrices of one width, at least one, none of them empty
    """

    parts: Sequence[StoredMatrix]
    _starts: Sequence[int] = field(init=False)  # the first row of each matrix, and the number of all rows

    @_starts.default
    def _heights_added_up(self) -> Sequence[int]:
        return [0, *accumulate(part.shape[0] for part in self.parts)]

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and columns."""
        return self._starts[-1], self.parts[0].shape[1]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the matrices."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def is_dense(self) -> bool:
        """Return whether all of the matrices are dense."""
        return all(part.is_dense for part in self.parts)

    def rows(self, index: slice) -> StoredMatrix:
        """See :meth:`StoredMatrix.rows`. Rows of one of the matrices have its own form."""
        first, last = bounds(index, self.shape[0])
        number = min(bisect_right(self._starts, first), len(self.parts)) - 1
        own: list[StoredMatrix] = []
        while True:
            start, part = self._starts[number], self.parts[number]
            end = min(last, self._starts[number + 1])
            is_whole = (first, end) == (start, self._starts[number + 1])
            own.append(part if is_whole else part.rows(slice(first - start, end - start)))
            first, number = end, number + 1
            if first >= last:
                return own[0] if len(own) == 1 else StackedMatrix(own)

    def cols(self, index: slice) -> StackedMatrix:
        """See :meth:`StoredMatrix.cols`."""
        return StackedMatrix([part.cols(index) for part in self.parts])

    def to(self, device: torch.device) -> StackedMatrix:
        """See :meth:`StoredMatrix.to`."""
        return StackedMatrix([part.to(device) for part in self.parts])

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """See :meth:`StoredMatrix.decoded`. One matrix at a time is in memory twice."""
        first, *others = self.parts
        values = first.decoded(dtype)
        if not others:
            return values
        out = values.new_empty(self.shape)
        out[: len(values)] = values
        for part, start in zip(others, self._starts[1:], strict=False):
            out[start : start + part.shape[0]] = part.decoded(dtype)
        return out

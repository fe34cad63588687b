"""Defines a matrix as a checkpoint stores it, from which every form of weight is made.

A checkpoint format is a class with the members of :class:`StoredMatrix`. The class of GGUF blocks is in
:mod:`paged_sdk.kernels.quantized.gguf_blocks`; that of dense numbers is :class:`DenseMatrix`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

import torch
from attrs import evolve, frozen
from torch import Tensor

__all__ = ["DecodedMatrix", "DenseMatrix", "StoredMatrix", "UnreadRows", "bounds"]


class StoredMatrix(Protocol):
    """Holds a matrix as the checkpoint stores it; rows and columns can be taken without decoding.

    The matrix may still be in the file (:class:`UnreadRows`). To keep it after loading, copy it with :meth:`to`, or
    make another form from its values.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and columns, in elements."""
        ...

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the matrix as stored."""
        ...

    @property
    def is_dense(self) -> bool:
        """Return whether the matrix is to be multiplied as floating point numbers; False: as stored, quantized."""
        ...

    def rows(self, index: slice) -> StoredMatrix:
        """Return a range of rows, sharing memory.

        :param index: a slice with step 1
        """
        ...

    def cols(self, index: slice) -> StoredMatrix:
        """Return a range of columns, copied if the format needs them contiguous.

        :param index: a slice with step 1
        :raises UnsupportedQuantizationError: the slice cuts a block of elements that share a scale
        """
        ...

    def to(self, device: torch.device) -> StoredMatrix:
        """Return the same matrix on a device, without a copy if it is there already."""
        ...

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values, ``[rows, columns]``, which may share memory with the stored matrix."""
        ...


@frozen(eq=False, kw_only=True)
class UnreadRows:
    """Represents rows in a file, which are read on each access.

    So a matrix can be packed while it is read, with only some rows of it in memory twice.

    :ivar shape: the shape of the tensor of all rows
    :ivar itemsize: bytes per element
    :ivar read: returns the rows from a first to a last (exclusive) as a new tensor
    :ivar first: offset of the first row, added to row numbers passed to ``read``
    """

    shape: tuple[int, int]
    itemsize: int
    read: Callable[[int, int], Tensor]
    first: int = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows."""
        return self.shape[0] * self.shape[1] * self.itemsize

    def __getitem__(self, index: slice) -> UnreadRows:
        """Return a range of rows, still unread."""
        first, last = bounds(index, self.shape[0])
        return evolve(self, shape=(last - first, self.shape[1]), first=self.first + first)

    def cols(self, index: slice) -> UnreadRows:
        """Return a range of columns, still unread; reading takes whole rows and copies the columns."""
        first, last = bounds(index, self.shape[1])
        read = self.read
        return evolve(
            self,
            shape=(self.shape[0], last - first),
            read=lambda start, stop: read(start, stop)[:, first:last].contiguous(),
        )

    def tensor(self) -> Tensor:
        """Read the rows."""
        return self.read(self.first, self.first + self.shape[0])


@frozen(eq=False)
class DenseMatrix:
    """Holds floating point numbers as a :class:`StoredMatrix`.

    :ivar stored: ``[rows, columns]``
    """

    stored: Tensor | UnreadRows

    @property
    def weight(self) -> Tensor:
        """Return the numbers, ``[rows, columns]``, reading them from the file if necessary."""
        return self.stored if isinstance(self.stored, Tensor) else self.stored.tensor()

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and columns."""
        rows, cols = self.stored.shape
        return rows, cols

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the numbers."""
        return self.stored.nbytes

    @property
    def is_dense(self) -> bool:
        """Return True."""
        return True

    def rows(self, index: slice) -> DenseMatrix:
        """See :meth:`StoredMatrix.rows`."""
        return DenseMatrix(self.stored[slice(*bounds(index, self.shape[0]))])

    def cols(self, index: slice) -> DenseMatrix:
        """See :meth:`StoredMatrix.cols`; the columns share memory or are still unread."""
        if isinstance(self.stored, UnreadRows):
            return DenseMatrix(self.stored.cols(index))
        return DenseMatrix(self.stored[:, slice(*bounds(index, self.shape[1]))])

    def to(self, device: torch.device) -> DenseMatrix:
        """See :meth:`StoredMatrix.to`."""
        return DenseMatrix(self.weight.to(device))

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """See :meth:`StoredMatrix.decoded`."""
        return self.weight.to(dtype)


@frozen(eq=False)
class DecodedMatrix:
    """Wraps a stored matrix that is to be multiplied as floating point numbers.

    It is decoded on request only, so that at most one of a layer's matrices is in memory twice.

    :ivar stored: the matrix to decode
    """

    stored: StoredMatrix

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
        """Return True."""
        return True

    def rows(self, index: slice) -> Self:
        """See :meth:`StoredMatrix.rows`."""
        return type(self)(self.stored.rows(index))

    def cols(self, index: slice) -> Self:
        """See :meth:`StoredMatrix.cols`."""
        return type(self)(self.stored.cols(index))

    def to(self, device: torch.device) -> Self:
        """See :meth:`StoredMatrix.to`."""
        return type(self)(self.stored.to(device))

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """See :meth:`StoredMatrix.decoded`."""
        return self.stored.decoded(dtype)


def bounds(index: slice, size: int) -> tuple[int, int]:
    """Return the first and last (exclusive) index of a slice with step 1.

    :param size: number of elements of the sliced dimension
    """
    first, last, step = index.indices(size)
    assert step == 1, "rows and columns are consecutive"
    return first, max(first, last)

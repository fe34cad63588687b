"""Defines a matrix as a checkpoint stores it, from which every form of weight is made.

A checkpoint format is a class with the members of :class:`StoredMatrix`. The class of GGUF's blocks is in
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
    """Keeps a matrix in the checkpoint's own numbers; parts can be taken without decoding the whole.

    It may still be in the file (:class:`UnreadRows`): what is kept beyond the loading is copied with :meth:`to`, or
    made from the values.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of rows and of columns, in elements."""
        ...

    @property
    def num_bytes(self) -> int:
        """Return how many bytes it takes as it is stored."""
        ...

    @property
    def is_dense(self) -> bool:
        """Say whether it is to be multiplied as floating point numbers; False: it is stored quantized."""
        ...

    def rows(self, index: slice) -> StoredMatrix:
        """Return some consecutive rows, which share the memory.

        :param index: its step must be 1
        """
        ...

    def cols(self, index: slice) -> StoredMatrix:
        """Return some consecutive columns, copied where the format needs them contiguous.

        :param index: its step must be 1
        :raises UnsupportedQuantizationError: the slice cuts a block of elements that share a scale
        """
        ...

    def to(self, device: torch.device) -> StoredMatrix:
        """Return the same matrix in the memory of a device, itself where it lies there already."""
        ...

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values, ``[rows, columns]``; they may share the memory of what is stored."""
        ...


@frozen(eq=False, kw_only=True)
class UnreadRows:
    """Stands for rows of a file that are read when they are asked for, each time anew.

    So a matrix is packed while it is read, some rows at a time, and no more of it than these is in memory twice.

    :ivar shape: as the tensor of all rows would have it
    :ivar itemsize: the bytes of one of its elements
    :ivar read: returns the rows from one number on and before another as a new tensor
    :ivar first: what is added to numbers of rows before they are read
    """

    shape: tuple[int, int]
    itemsize: int
    read: Callable[[int, int], Tensor]
    first: int = 0

    @property
    def nbytes(self) -> int:
        """Return how many bytes the rows take."""
        return self.shape[0] * self.shape[1] * self.itemsize

    def __getitem__(self, index: slice) -> UnreadRows:
        """Return some consecutive rows, which are not read either."""
        first, last = bounds(index, self.shape[0])
        return evolve(self, shape=(last - first, self.shape[1]), first=self.first + first)

    def cols(self, index: slice) -> UnreadRows:
        """Return some consecutive columns of the rows, which are read whole, some rows at a time, and kept so."""
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
        """Return the numbers, ``[rows, columns]``, which are read if they are in a file still."""
        return self.stored if isinstance(self.stored, Tensor) else self.stored.tensor()

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of rows and of columns."""
        rows, cols = self.stored.shape
        return rows, cols

    @property
    def num_bytes(self) -> int:
        """Return how many bytes the numbers take."""
        return self.stored.nbytes

    @property
    def is_dense(self) -> bool:
        """Return True."""
        return True

    def rows(self, index: slice) -> DenseMatrix:
        """See :meth:`StoredMatrix.rows`."""
        return DenseMatrix(self.stored[slice(*bounds(index, self.shape[0]))])

    def cols(self, index: slice) -> DenseMatrix:
        """See :meth:`StoredMatrix.cols`; the memory is shared, or they are read when they are asked for."""
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
    """Wraps a matrix that is to be multiplied as floating point numbers, however it is stored.

    It is decoded when asked and not before, so that no more than one of a layer's matrices is in memory twice.

    :ivar stored: what is decoded
    """

    stored: StoredMatrix

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of rows and of columns."""
        return self.stored.shape

    @property
    def num_bytes(self) -> int:
        """Return how many bytes the stored matrix takes."""
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
    """Return the index of a slice's first element, and the one after its last; the slice's step is 1.

    :param size: number of elements of what is sliced
    """
    first, last, step = index.indices(size)
    assert step == 1, "rows and columns are consecutive"
    return first, max(first, last)

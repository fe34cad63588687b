"""A matrix as a checkpoint stores it: what every form of weight is made from.

A checkpoint format is a class with the members of :class:`StoredMatrix`. GGUF's blocks have theirs in
:mod:`paged_sdk.kernels.gguf_blocks`; numbers that are stored each by itself have :class:`DenseMatrix`.
"""

from __future__ import annotations

from typing import Protocol, Self

import torch
from attrs import frozen
from torch import Tensor

__all__ = ["DecodedMatrix", "DenseMatrix", "StoredMatrix", "bounds"]


class StoredMatrix(Protocol):
    """A matrix in the checkpoint's own numbers, of which parts can be taken without decoding the whole."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns in elements."""
        ...

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes as it is stored."""
        ...

    @property
    def is_dense(self) -> bool:
        """Whether it is to be multiplied as floating point numbers; False: it is stored quantized."""
        ...

    def rows(self, index: slice) -> StoredMatrix:
        """Some consecutive rows, which share the memory.

        :param index: its step must be 1
        """
        ...

    def cols(self, index: slice) -> StoredMatrix:
        """Some consecutive columns, copied where the format needs them contiguous.

        :param index: its step must be 1
        :raises UnsupportedQuantizationError: the slice cuts a block of elements that share a scale
        """
        ...

    def to(self, device: torch.device) -> StoredMatrix:
        """The same matrix on a device; itself where it lies there already."""
        ...

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, ``[rows, columns]``; they may share the memory of what is stored."""
        ...


@frozen(eq=False)
class DenseMatrix:
    """A :class:`StoredMatrix` of floating point numbers.

    :ivar weight: ``[rows, columns]``
    """

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, cols = self.weight.shape
        return rows, cols

    @property
    def num_bytes(self) -> int:
        """The bytes of the numbers."""
        return self.weight.nbytes

    @property
    def is_dense(self) -> bool:
        """Always."""
        return True

    def rows(self, index: slice) -> DenseMatrix:
        """See :meth:`StoredMatrix.rows`."""
        return DenseMatrix(self.weight[slice(*bounds(index, self.weight.shape[0]))])

    def cols(self, index: slice) -> DenseMatrix:
        """See :meth:`StoredMatrix.cols`; the memory is shared."""
        return DenseMatrix(self.weight[:, slice(*bounds(index, self.weight.shape[1]))])

    def to(self, device: torch.device) -> DenseMatrix:
        """See :meth:`StoredMatrix.to`."""
        return DenseMatrix(self.weight.to(device))

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """See :meth:`StoredMatrix.decoded`."""
        return self.weight.to(dtype)


@frozen(eq=False)
class DecodedMatrix:
    """A matrix that is to be multiplied as floating point numbers, however it is stored. It is decoded when it is asked
    to be, and not before: so that no more than one of a layer's matrices is in memory twice.

    :ivar stored: what is decoded
    """

    stored: StoredMatrix

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.stored.shape

    @property
    def num_bytes(self) -> int:
        """The bytes of what is stored."""
        return self.stored.num_bytes

    @property
    def is_dense(self) -> bool:
        """Always."""
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
    """The first element of a slice of consecutive ones, and the one after its last.

    :param size: of what is sliced
    """
    first, last, step = index.indices(size)
    assert step == 1, "rows and columns are consecutive"
    return first, max(first, last)

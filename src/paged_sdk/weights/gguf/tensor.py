"""Describe and read a tensor of a GGUF file."""

from __future__ import annotations

import math

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix, block_format, dequantize, tensor_type_of
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix, UnreadRows
from paged_sdk.weights.weight_file import WeightFile

__all__ = ["GgufTensor", "RowDifference", "stored_matrix"]


@frozen
class GgufTensor:
    """Describes one tensor of a GGUF file.

    :ivar name: GGUF's name
    :ivar shape: the shape in torch's order: the last dimension is contiguous
    :ivar type: the ggml type id
    :ivar file: the file that contains the tensor
    :ivar offset: the offset of its first byte
    :ivar factors: numbers that multiply the stored values: one for all of them, or one per part along the first
        dimension; empty: there are none
    """

    name: str
    shape: tuple[int, ...]
    type: int
    file: WeightFile
    offset: int
    num_bytes: int
    factors: tuple[float, ...] = field(default=(), kw_only=True)

    @property
    def is_quantized(self) -> bool:
        """Return whether the type has blocks of several elements."""
        return block_format(self.type).elements > 1

    def blocks(self) -> Tensor:
        """Read the tensor as it is stored: a new uint8 [..., bytes of a row].

        :raises CheckpointError: the file is closed, or has changed since it was opened
        """
        return self.read(0, self.num_bytes).view(*self.shape[:-1], -1)

    def read(self, first: int, count: int) -> Tensor:
        """Read some of the tensor's bytes."""
        return self.file.tensor(self.offset + first, count)

    def unread_rows(self) -> UnreadRows:
        """Return the tensor as a matrix, uint8 [rows, bytes of a row], whose rows are read on demand."""
        rows = math.prod(self.shape[:-1])
        row_bytes = self.num_bytes // rows

        def read_rows(first: int, last: int) -> Tensor:
            return self.read(first * row_bytes, (last - first) * row_bytes).view(-1, row_bytes)

        return UnreadRows(shape=(rows, row_bytes), itemsize=1, read=read_rows)

    def unstacked(self) -> list[GgufTensor]:
        """Return the tensor's parts along the first dimension; it must have at least two dimensions."""
        count, *shape = self.shape
        size = self.num_bytes // count
        factors = [self.factors] * count if len(self.factors) < 2 else [(factor,) for factor in self.factors]
        return [
            evolve(self, shape=tuple(shape), offset=self.offset + i * size, num_bytes=size, factors=factors[i])
            for i in range(count)
        ]

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Read the tensor's values."""
        return dequantize(self.type, self.blocks(), dtype=dtype)


@frozen
class RowDifference(GgufTensor):
    """Describes the first of a tensor's two rows minus the second, float32 ``[1, columns]``.

    :ivar rows: the tensor with two rows
    """

    rows: GgufTensor

    @classmethod
    def of(cls, rows: GgufTensor) -> RowDifference:
        """Return the difference of the rows of a tensor ``[2, columns]``."""
        columns = rows.shape[1]
        size = columns * torch.float32.itemsize
        return cls(rows.name, (1, columns), tensor_type_of("F32"), rows.file, rows.offset, size, rows)

    def read(self, first: int, count: int) -> Tensor:
        rows = self.rows.decoded()
        return (rows[0] - rows[1]).view(torch.uint8)[first : first + count]


def stored_matrix(tensor_type: int, rows: UnreadRows) -> StoredMatrix:
    """Return a matrix that reads its rows when they are decoded.

    :param rows: the stored bytes, uint8 [rows, bytes of a row]
    """
    form = block_format(tensor_type)
    if form.elements > 1:
        return BlockMatrix(tensor_type, rows)

    def read(first: int, last: int) -> Tensor:
        return form.decode(rows[first:last].tensor())

    shape = rows.shape[0], rows.shape[1] // form.num_bytes
    return DenseMatrix(UnreadRows(shape=shape, itemsize=form.num_bytes, read=read))

"""Present tensors of a GGUF file as a Hugging Face checkpoint has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.errors import CheckpointError, shown
from paged_sdk.kernels.quantized.blocks_to_groups import as_groups
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix, block_format, dequantize
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix
from paged_sdk.kernels.quantized.reordered_matrix import JoinedMatrix, ReorderedColumns
from paged_sdk.kernels.quantized.stored_matrix import DecodedMatrix, DenseMatrix, StoredMatrix, UnreadRows
from paged_sdk.weights.gguf.tensor import GgufTensor, stored_matrix
from paged_sdk.weights.qkv_order import runs

__all__ = ["GgufWeight", "JoinedWeight", "LatentUpWeight", "NumberWeight"]


@frozen(eq=False)
class GgufWeight:
    """Describes a tensor and how its values differ from the Hugging Face checkpoint's.

    :ivar permuted_heads: the number of heads, if the rows are permuted within each head; 0: no permutation
    :ivar order: the stored row of each row of Hugging Face's order; None: the order is the same
    :ivar columns: likewise for groups of columns, and the width of a group
    :ivar offset: the constant that GGUF adds to the values
    :ivar is_rate: whether the values are negated rates, of which Hugging Face has the logarithm
    """

    stored: GgufTensor
    permuted_heads: int = 0
    order: Tensor | None = None
    columns: tuple[Tensor, int] | None = None
    offset: float = 0.0
    is_rate: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the tensor's shape."""
        return self.stored.shape

    @property
    def path(self) -> Path:
        """Return the file."""
        return self.stored.file.path

    @property
    def is_quantized(self) -> bool:
        """Return whether the tensor is stored in quantized blocks."""
        return self.stored.is_quantized

    def values(self, dtype: torch.dtype) -> Tensor:
        """Read the values.

        :raises CheckpointError: a rate is not negated
        """
        if self.is_rate:
            rates = -dequantize(self.stored.type, self._blocks())
            if bool((rates < 0).any()):
                raise CheckpointError(
                    f"{self.path}: tensor {shown(self.stored.name)} has numbers above 0", path=self.path
                )
            return rates.log().to(dtype)
        if self.offset:
            return (dequantize(self.stored.type, self._blocks()) - self.offset).to(dtype)
        if self.columns is not None or self.stored.factors:
            return self.matrix().decoded(dtype).view(self.shape)
        return dequantize(self.stored.type, self._blocks(), dtype=dtype)

    def matrix(self) -> StoredMatrix:
        """Return the matrix; the matrices of a tensor with more than two dimensions are stacked vertically."""
        rows = self._unread_rows()
        if self.offset:
            return DenseMatrix(dequantize(self.stored.type, rows.tensor()) - self.offset)
        if self.columns is None:
            return self._stored(rows)
        order, width = self.columns
        form = block_format(self.stored.type)
        if width % form.elements:
            return ReorderedColumns(self._stored(rows), order.argsort(), width)
        size = width // form.elements * form.num_bytes
        return self._stored(evolve(rows, read=partial(_read_columns_in_order, rows, order, size)))

    def _stored(self, rows: UnreadRows) -> StoredMatrix:
        """Return the matrix that is stored in rows of bytes."""
        matrix, factors = stored_matrix(self.stored.type, rows), self.stored.factors
        if not factors:
            return matrix
        grouped = as_groups(matrix) if isinstance(matrix, BlockMatrix) else None
        assert grouped is not None, "NVFP4 alone has factors, and groups"
        of_rows = torch.tensor(factors, dtype=torch.float32).repeat_interleave(matrix.shape[0] // len(factors))
        return evolve(grouped, read=partial(_read_multiplied, grouped.read, of_rows))

    def _blocks(self) -> Tensor:
        """Return the stored bytes, uint8 [..., bytes of a row], with the rows in Hugging Face's order."""
        if len(self.shape) > 1:
            return self._unread_rows().tensor().view(*self.shape[:-1], -1)
        blocks = self.stored.blocks()
        if self.order is not None:
            return blocks.view(self.shape[0], -1)[self.order].view(-1)
        if not self.permuted_heads:
            return blocks
        return _unpermuted(blocks.view(self.shape[0], -1), self.shape[0] // self.permuted_heads).view(-1)

    def _unread_rows(self) -> UnreadRows:
        """Return the stored matrix, uint8 [rows, bytes of a row], with the rows in Hugging Face's order."""
        rows = self.stored.unread_rows()
        if self.order is not None:
            return evolve(rows, read=partial(_read_in_order, rows, self.order))
        if not self.permuted_heads:
            return rows
        return evolve(rows, read=partial(_read_unpermuted, rows, rows.shape[0] // self.permuted_heads))


@frozen
class NumberWeight:
    """Describes a tensor of one number that the file has in its metadata.

    :ivar path: the file
    """

    number: float
    shape: tuple[int, ...]
    path: Path

    @property
    def is_quantized(self) -> bool:
        """Return whether the tensor is stored in quantized blocks: it is not."""
        return False

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the number as a tensor."""
        return torch.full(self.shape, self.number, dtype=dtype)

    def matrix(self) -> StoredMatrix:
        """Return the number as a matrix of one row and one column."""
        return DenseMatrix(torch.full((1, 1), self.number))


@frozen(eq=False)
class JoinedWeight:
    """Describes a matrix that has the rows of several tensors, which may have different types.

    :ivar parts: the tensors, matrices of one width
    :ivar order: for each row, its index in the tensors stacked vertically
    """

    parts: tuple[GgufWeight, ...]
    order: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of rows and columns."""
        return len(self.order), self.parts[0].shape[1]

    @property
    def path(self) -> Path:
        """Return the file of the first tensor."""
        return self.parts[0].path

    @property
    def is_quantized(self) -> bool:
        """Return whether any of the tensors is stored in quantized blocks."""
        return any(part.is_quantized for part in self.parts)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Read the values."""
        return self.matrix().decoded(dtype)

    def matrix(self) -> StoredMatrix:
        """Return the matrix."""
        return JoinedMatrix([part.matrix() for part in self.parts], self.order)


@frozen(eq=False)
class LatentUpWeight:
    """Describes the projection of latent vectors to each head's keys, then its values, which GGUF keeps apart.

    :ivar of_keys: a stack of transposed matrices, ``[num_heads, rank, nope_dim]``
    :ivar of_values: a stack of matrices, ``[num_heads, value_dim, rank]``
    """

    of_keys: GgufWeight
    of_values: GgufWeight

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of rows and columns."""
        num_heads, value_dim, rank = self.of_values.shape
        return num_heads * (self.of_keys.shape[2] + value_dim), rank

    @property
    def path(self) -> Path:
        """Return the file of the keys' matrices."""
        return self.of_keys.path

    @property
    def is_quantized(self) -> bool:
        """Return whether either stack is stored in quantized blocks."""
        return self.of_keys.is_quantized or self.of_values.is_quantized

    def values(self, dtype: torch.dtype) -> Tensor:
        """Read the values."""
        return torch.cat([self.of_keys.values(dtype).mT, self.of_values.values(dtype)], 1).flatten(0, 1)

    def matrix(self) -> StoredMatrix:
        """Return the matrix's values: a block of the keys' has elements of several rows."""
        values = DenseMatrix(self.values(torch.float32))
        return _QuantizedValues(values) if self.is_quantized else values


class _QuantizedValues(DecodedMatrix):
    """Wraps the values of a matrix that is stored quantized, in blocks that cannot be multiplied as its rows."""

    @property
    def is_dense(self) -> bool:
        """Return False."""
        return False


def _read_multiplied(
    read: Callable[[int, int], GroupedMatrix], factors: Tensor, first: int, last: int
) -> GroupedMatrix:
    """Read some rows with the scales of each multiplied by its factor."""
    part = read(first, last)
    return evolve(part, scales=part.scales * factors[first:last, None])


def _read_in_order(rows: UnreadRows, order: Tensor, first: int, last: int) -> Tensor:
    """Read some rows in Hugging Face's order, with one read per run of rows that are consecutive in the file."""
    return torch.cat([rows[start:end].tensor() for start, end in runs(order[first:last])])


def _read_unpermuted(rows: UnreadRows, head_size: int, first: int, last: int) -> Tensor:
    """Read some rows in Hugging Face's order; whole heads are read to undo the permutation."""
    before = first // head_size * head_size
    stored = rows[before : -(-last // head_size) * head_size].tensor()
    return _unpermuted(stored, head_size)[first - before : last - before]


def _unpermuted(rows: Tensor, head_size: int) -> Tensor:
    """Return rows, uint8 [n, row], in Hugging Face's order: within each head the even rows, then the odd rows."""
    # With numpy, on one thread: torch would split these 0.1 ms among all threads, and wait for busy cores.
    heads = rows.numpy().reshape(-1, head_size // 2, 2, rows.shape[1])
    return torch.from_numpy(np.ascontiguousarray(heads.swapaxes(1, 2))).view(rows.shape)


def _read_columns_in_order(rows: UnreadRows, order: Tensor, size: int, first: int, last: int) -> Tensor:
    """Read some rows with groups of their bytes in another order.

    :param size: bytes of a group
    """
    stored = rows[first:last].tensor()
    return stored.view(last - first, -1, size)[:, order].flatten(1)

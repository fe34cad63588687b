"""Hold the matrices of a checkpoint that make up a GGUF tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import shown
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.weights.qkv_order import runs
from paged_sdk.weights.source import WeightSource, malformed

__all__ = ["GgufMatrix", "column", "in_order", "without_input_channel"]


@frozen(eq=False, kw_only=True)
class GgufMatrix:
    """Holds the matrices of a checkpoint that, stacked vertically, make up a GGUF tensor.

    :ivar shape: the GGUF tensor's shape, in torch's order
    :ivar permuted_heads: the number of heads, if GGUF permutes the rows within each head; 0: no permutation
    :ivar columns: GGUF's order of groups of columns, and the width of a group; None: the order is the same
    :ivar offset: a constant that GGUF adds to the values
    :ivar factors: what GGUF multiplies each row of each matrix by; None: nothing
    """

    shape: tuple[int, ...]
    matrices: Sequence[StoredMatrix]
    permuted_heads: int = 0
    columns: tuple[Tensor, int] | None = None
    offset: float = 0.0
    factors: Tensor | None = None

    def pieces(self, num_rows: int) -> Iterator[tuple[int, Callable[[], Tensor]]]:
        """Yield the rows in pieces of at most about ``num_rows``, in GGUF's order.

        :returns: for each piece, the index of the GGUF tensor's matrix that contains it, and a function that decodes
            it: float32 ``[rows, columns]``
        """
        height, done = self.shape[-2 if len(self.shape) > 1 else 0], 0
        for matrix in self.matrices:
            rows, first = matrix.shape[0], 0
            head = rows // self.permuted_heads if self.permuted_heads else 1
            step = max(1, num_rows // head) * head
            while first < rows:
                number, row = divmod(done + first, height)
                last = min(rows, first + step, first + height - row)
                yield number, partial(self._decoded, matrix, slice(first, last), head)
                first = last
            done += rows

    def _decoded(self, matrix: StoredMatrix, rows: slice, head: int) -> Tensor:
        values = matrix.rows(rows).decoded(torch.float32)
        if self.offset:
            values = values + self.offset
        if self.factors is not None:
            values = values * self.factors[rows, None]
        if self.columns is not None:
            order, width = self.columns
            values = torch.unflatten(values, 1, (-1, width))[:, order].flatten(1)
        return _permuted(values, head) if self.permuted_heads else values


def column(source: WeightSource, name: str) -> DenseMatrix:
    """Return a vector as a matrix with one column."""
    return DenseMatrix(source.tensor(name, torch.float32, torch.device("cpu")).view(-1, 1))


def in_order(source: WeightSource, name: str, order: Tensor) -> GgufMatrix:
    """Return a tensor with its rows in another order.

    :param order: for each row of GGUF's, its index in the checkpoint's
    """
    shape = source.shape(name)
    whole = source.matrix(name) if len(shape) > 1 else column(source, name)
    if shape[0] != len(order):
        raise malformed(source, name, f"tensor {shown(name)} has {shape[0]} rows: expected {len(order)}")
    return GgufMatrix(
        shape=shape if len(shape) < 3 else without_input_channel(shape),
        matrices=[whole.rows(slice(first, end)) for first, end in runs(order)],
    )


def without_input_channel(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a convolution with one input channel, of which GGUF has no dimension."""
    return shape[0], shape[-1]


def _permuted(rows: Tensor, head: int) -> Tensor:
    """Return rows in GGUF's order: within each head, the rows of its two halves interleaved."""
    heads = rows.numpy().reshape(-1, 2, head // 2, rows.shape[1])
    return torch.from_numpy(np.ascontiguousarray(heads.swapaxes(1, 2))).view(rows.shape)

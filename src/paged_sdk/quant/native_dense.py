"""Dense weights in the native kernels' layout: products, and rows of the same memory as token embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.packed import PackedWeight, unpack_rows
from paged_sdk.kernels.step import StepContext
from paged_sdk.kernels.stored_matrix import DenseMatrix, bounds
from paged_sdk.quant.embedding import Embedding
from paged_sdk.quant.linear import Linear, NativeWeights

__all__ = ["NativeDenseLinear", "PackedEmbedding", "PackedMatrix"]


class NativeDenseLinear(Linear):
    """Dense matrices of one input, packed, whose outputs lie side by side. One form serves every number of rows.

    :param workspace: of the engine that calls
    :param weights: dense, of one dtype, in the order of their outputs
    :param biases: one per weight, or None
    """

    def __init__(self, workspace: Workspace, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> None:
        few = tuple(weights)
        self._native = NativeWeights(few=few, many=few, biases=tuple(biases))
        self._linear = NativeLinear(workspace, few, biases=biases)

    @property
    def in_features(self) -> int:
        """Columns of the weights."""
        return self._linear.in_features

    @property
    def out_features(self) -> int:
        """Rows of all weights."""
        return self._linear.out_features

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights."""
        return self._linear.num_bytes

    @property
    def native_weights(self) -> NativeWeights:
        """See :attr:`Linear.native_weights`."""
        return self._native

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """See :meth:`Linear.forward`; float32, bfloat16 or float16."""
        return self._linear(x)


@frozen(eq=False)
class PackedMatrix:
    """A packed dense matrix as a :class:`~paged_sdk.kernels.stored_matrix.StoredMatrix`: another use of the matrix
    shares its memory, or has the numbers back.

    :ivar weight: dense
    """

    weight: PackedWeight

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.weight.rows, self.weight.cols

    @property
    def num_bytes(self) -> int:
        """The bytes of the packed matrix."""
        return self.weight.num_bytes

    @property
    def is_dense(self) -> bool:
        """Always."""
        return True

    def rows(self, index: slice) -> DenseMatrix:
        """Some consecutive rows, copied."""
        return DenseMatrix(unpack_rows(self.weight, torch.arange(*bounds(index, self.weight.rows))))

    def cols(self, index: slice) -> DenseMatrix:
        """Some consecutive columns, copied."""
        return DenseMatrix(self.decoded()).cols(index)

    def to(self, device: torch.device) -> PackedMatrix | DenseMatrix:
        """Itself on the CPU; the numbers elsewhere."""
        return self if device.type == "cpu" else DenseMatrix(self.decoded()).to(device)

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers, copied."""
        return unpack_rows(self.weight, torch.arange(self.weight.rows)).to(dtype)


class PackedEmbedding(Embedding):
    """Rows of a packed dense matrix, which an output projection that is tied to it multiplies by.

    :param weight: ``[vocab_size, hidden_size]``, dense, of the model's dtype
    :param scale: as of :class:`Embedding`
    """

    def __init__(self, weight: PackedWeight, *, scale: float | None = None) -> None:
        assert weight.dense_dtype is not None, weight.format
        super().__init__(dtype=weight.dense_dtype, scale=scale)
        self.weight = weight

    @property
    def stored(self) -> PackedMatrix:
        """The table, which shares the memory."""
        return PackedMatrix(self.weight)

    def _rows(self, token_ids: Tensor) -> Tensor:
        return unpack_rows(self.weight, token_ids)

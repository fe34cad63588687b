"""Pack dense weights for the native kernels. Products and embedding lookups share the packed memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.packed import PackedWeight, unpack_rows
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, bounds
from paged_sdk.kernels.step import StepContext
from paged_sdk.quant.linear import DecodedRows, Linear, NativeWeights, decoded_matrices
from paged_sdk.quant.native_embedding import NativeEmbedding

__all__ = ["NativeDenseLinear", "PackedDenseMatrix", "PackedEmbedding"]


class NativeDenseLinear(Linear):
    """Multiplies dense packed matrices that share an input, and concatenates their outputs. One packed form serves any
    number of rows.

    :param workspace: the calling engine's workspace
    :param weights: the dense packed matrices, of one dtype, in the order of their outputs
    :param biases: one per weight, or None
    """

    def __init__(self, workspace: Workspace, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> None:
        few = tuple(weights)
        self._native = NativeWeights(few=few, many=few, biases=tuple(biases))
        self._linear = NativeLinear(workspace, few, biases=biases)
        super().__init__(
            in_features=self._linear.in_features,
            out_features=self._linear.out_features,
            num_bytes=self._linear.num_bytes,
        )

    @property
    def native_weights(self) -> NativeWeights:
        """Implement :attr:`Linear.native_weights`."""
        return self._native

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Implement :meth:`Linear.forward`, in float32, bfloat16 or float16."""
        return self._linear(x)

    def decoded(self, device: torch.device) -> Iterator[DecodedRows]:
        """Implement :meth:`Linear.decoded`."""
        return decoded_matrices(self._native, lambda weight, rows: unpack_rows(weight, rows).float())


@frozen(eq=False)
class PackedDenseMatrix:
    """Adapts a packed dense matrix to :class:`~paged_sdk.kernels.quantized.stored_matrix.StoredMatrix`, so that another
    use of the matrix can share its memory or unpack its values.

    :ivar weight: the packed dense matrix
    """

    weight: PackedWeight

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of rows and columns."""
        return self.weight.rows, self.weight.cols

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the packed matrix."""
        return self.weight.num_bytes

    @property
    def is_dense(self) -> bool:
        """Return True."""
        return True

    def rows(self, index: slice) -> DenseMatrix:
        """Return a copy of consecutive rows."""
        return DenseMatrix(unpack_rows(self.weight, torch.arange(*bounds(index, self.weight.rows))))

    def cols(self, index: slice) -> DenseMatrix:
        """Return a copy of consecutive columns."""
        return DenseMatrix(self.decoded()).cols(index)

    def to(self, device: torch.device) -> PackedDenseMatrix | DenseMatrix:
        """Return the matrix itself for the CPU, or a copy of its values for another device."""
        return self if device.type == "cpu" else DenseMatrix(self.decoded()).to(device)

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a copy of the values."""
        return unpack_rows(self.weight, torch.arange(self.weight.rows)).to(dtype)


class PackedEmbedding(NativeEmbedding):
    """Looks up rows of a packed dense matrix, which a tied output projection can share.

    :param workspace: the calling engine's workspace
    :param weight: ``[vocab_size, hidden_size]``, dense, of the model's dtype
    :param scale: see :class:`~paged_sdk.quant.embedding.Embedding`
    """

    def __init__(self, workspace: Workspace, weight: PackedWeight, *, scale: float | None = None) -> None:
        assert weight.dense_dtype is not None, weight.format
        super().__init__(workspace, weight, dtype=weight.dense_dtype, scale=scale)

    @property
    def stored(self) -> PackedDenseMatrix:
        """Return the table. It shares this embedding's memory."""
        return PackedDenseMatrix(self.weight)

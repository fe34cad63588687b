"""Serve dense matrices on the CPU, packed for the native kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.native.packed import DENSE_TYPES, PackedWeight, pack_dense, whole_panels
from paged_sdk.kernels.native.ranks import ColumnJoin
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.quant.embedding import Embedding
from paged_sdk.quant.experts import ExpertExtras, Experts, Projections
from paged_sdk.quant.form import Form, Place
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.native_block_experts import NativeBlockExperts
from paged_sdk.quant.native_dense import NativeDenseLinear, PackedDenseMatrix, PackedEmbedding

__all__ = ["FORM"]

# Fits a core's second-level cache, and memory that the allocator reuses instead of mapping new pages.
_BYTES_AT_ONCE: Final = 1 << 19
_WIDTH: Final = 16  # columns that the kernels read at a time
_UNIT: Final = 32  # rows of an expert that are multiplied together


class _NativeDense(Form):
    """Serves packed copies in the model's dtype. Embeddings and a tied output projection share one copy."""

    def linear(
        self, matrices: Sequence[StoredMatrix], biases: Sequence[Tensor | None], place: Place, *, is_head: bool
    ) -> Linear | None:
        if place.workspace is None or not _served(matrices, place):
            return None
        return NativeDenseLinear(place.workspace, [_packed([matrix], place) for matrix in matrices], biases)

    def experts(
        self,
        matrices: Projections[Sequence[StoredMatrix]],
        place: Place,
        *,
        extras: ExpertExtras | None,
        join: ColumnJoin | None,
        activation: KernelActivation,
    ) -> Experts | None:
        everything = [matrix for stack in matrices.all for matrix in stack]
        if place.workspace is None or not _served(everything, place):
            return None
        if any(matrix.shape[0] % _UNIT for matrix in everything):
            return None
        packed = matrices.map(lambda stack: _packed(stack, place))
        return NativeBlockExperts(
            place.workspace, packed, num_experts=len(matrices.up), extras=extras, join=join, activation=activation
        )

    def embedding(self, matrix: StoredMatrix, place: Place, *, scale: float | None) -> Embedding | None:
        if place.workspace is None or not _served([matrix], place):
            return None
        return PackedEmbedding(place.workspace, _packed([matrix], place), scale=scale)


def _served(matrices: Sequence[StoredMatrix], place: Place) -> bool:
    return (
        place.workspace is not None
        and place.device.type == "cpu"
        and place.dtype in DENSE_TYPES
        and all(matrix.is_dense and matrix.shape[1] % _WIDTH == 0 for matrix in matrices)
    )


def _packed(matrices: Sequence[StoredMatrix], place: Place) -> PackedWeight:
    """Concatenate matrices along the rows and pack them; only a few rows at a time are in memory twice."""
    first = matrices[0]
    if isinstance(first, PackedDenseMatrix) and len(matrices) == 1 and first.weight.dense_dtype == place.dtype:
        return first.weight
    assert place.workspace is not None
    shape = sum(matrix.shape[0] for matrix in matrices), first.shape[1]
    library, parts = place.workspace.library, _parts(matrices, place)
    # One thread per layer: other threads load other layers.
    return pack_dense(library, parts, shape, place.dtype, num_threads=1, memory=place.memory)


def _parts(matrices: Sequence[StoredMatrix], place: Place) -> Iterator[Tensor]:
    for matrix in matrices:
        rows, step = matrix.shape[0], _rows_at_once(matrix)
        for row in range(0, rows, step):
            part = matrix.rows(slice(row, min(row + step, rows)))
            # Packing rounds to the target dtype.
            values = part.weight if isinstance(part, DenseMatrix) else None
            yield values if values is not None and values.dtype in DENSE_TYPES else part.decoded(place.dtype)


def _rows_at_once(matrix: StoredMatrix) -> int:
    rows, cols = matrix.shape
    row_bytes = max(cols * 2, matrix.num_bytes // max(1, rows))
    return whole_panels(_BYTES_AT_ONCE // row_bytes)


FORM: Final = _NativeDense()

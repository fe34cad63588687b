"""Serve GGUF blocks on the CPU: by the native kernels at the file's own bits per weight, or without them by torch in
int8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.native.grouped import can_be_packed, pack_grouped
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.packed import PACKED_TYPES, PackedWeight, gains_in_hadamard, pack_gguf, whole_panels
from paged_sdk.kernels.native.quantize import quantize_blocks
from paged_sdk.kernels.native.ranks import ColumnJoin
from paged_sdk.kernels.quantized.blocks_to_groups import as_groups
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix, tensor_type_of
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.quant.embedding import BlockEmbedding, Embedding
from paged_sdk.quant.experts import ExpertExtras, Experts, Projections
from paged_sdk.quant.form import Form, Place
from paged_sdk.quant.hadamard_int8 import HadamardInt8Linear
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.native_block import NativeBlockLinear, PackedBlockEmbedding
from paged_sdk.quant.native_block_experts import NativeBlockExperts

__all__ = ["FORM"]

_ROWS_AT_ONCE: Final = 1024  # rows decoded at a time
# Fits a core's second-level cache, and memory that the allocator reuses instead of mapping new pages.
_BYTES_AT_ONCE: Final = 1 << 19


class _CpuBlocks(Form):
    """Serves blocks of any format. Embeddings decode rows on lookup and share memory with a tied output projection."""

    def linear(
        self, matrices: Sequence[StoredMatrix], biases: Sequence[Tensor | None], place: Place, *, is_head: bool
    ) -> Linear | None:
        blocks = [matrix for matrix in matrices if isinstance(matrix, BlockMatrix)]
        if len(blocks) < len(matrices) or place.device.type != "cpu":
            return None
        if place.workspace is None:
            return HadamardInt8Linear(blocks, biases)
        library = place.workspace.library
        packed = [_packed(library, [each], place) for each in blocks]
        hadamard_for_many = not (place.one_form or is_head) and gains_in_hadamard(library, packed)
        return NativeBlockLinear(place.workspace, packed, biases, hadamard_for_many=hadamard_for_many)

    def experts(
        self,
        matrices: Projections[Sequence[StoredMatrix]],
        place: Place,
        *,
        extras: ExpertExtras | None,
        join: ColumnJoin | None,
        activation: KernelActivation,
    ) -> Experts | None:
        workspace, stacks = place.workspace, matrices.try_map(_of_one_type)
        if workspace is None or stacks is None:
            return None
        packed = stacks.map(lambda stack: _packed(workspace.library, stack, place))
        return NativeBlockExperts(
            workspace, packed, num_experts=len(matrices.up), extras=extras, join=join, activation=activation
        )

    def embedding(self, matrix: StoredMatrix, place: Place, *, scale: float | None) -> Embedding | None:
        if not isinstance(matrix, BlockMatrix) or place.device.type != "cpu":
            return None
        if place.workspace is None or matrix.tensor_type not in PACKED_TYPES:
            return BlockEmbedding(matrix, dtype=place.dtype, scale=scale)
        packed = _packed_as_stored(place.workspace.library, [matrix], place)
        return PackedBlockEmbedding(place.workspace, packed, dtype=place.dtype, scale=scale)

    def tied_head(self, embedding: Embedding, place: Place) -> Linear | None:
        if not isinstance(embedding, PackedBlockEmbedding) or place.workspace is None:
            return None
        return NativeBlockLinear(place.workspace, [embedding.weight], [None])


def _of_one_type(matrices: Sequence[StoredMatrix]) -> list[BlockMatrix] | None:
    """Return the matrices if all are blocks of one type, else None."""
    blocks = [matrix for matrix in matrices if isinstance(matrix, BlockMatrix)]
    types = {matrix.tensor_type for matrix in blocks}
    return blocks if len(blocks) == len(matrices) and len(types) == 1 else None


def _packed(library: NativeLibrary, matrices: Sequence[BlockMatrix], place: Place) -> PackedWeight:
    """Concatenate matrices of one type along the rows and pack them for the native kernels: in their own blocks, or as
    grouped codes if the blocks' codes index a table. Other types are converted to Q8_0 (int8, one scale per 32
    weights).
    """
    tensor_type = matrices[0].tensor_type
    if tensor_type in PACKED_TYPES:
        return _packed_as_stored(library, matrices, place)
    grouped = [each for each in map(as_groups, matrices) if each is not None]
    if len(grouped) == len(matrices) and can_be_packed(grouped):
        # One thread per layer: other threads load other layers.
        return pack_grouped(library, grouped, num_threads=1, memory=place.memory)
    target = tensor_type_of("Q8_0")
    parts = (
        quantize_blocks(library, part.decoded(), target) for matrix in matrices for part in matrix.parts(_ROWS_AT_ONCE)
    )
    return _pack(library, parts, target, matrices, place)


def _packed_as_stored(library: NativeLibrary, matrices: Sequence[BlockMatrix], place: Place) -> PackedWeight:
    """Pack matrices in parts that fit the processor's caches, so that each part is still cached when it is packed."""
    first = matrices[0]
    rows = whole_panels(_BYTES_AT_ONCE // (first.num_bytes // first.shape[0]))
    parts = (part.blocks for matrix in matrices for part in matrix.parts(rows))
    return _pack(library, parts, first.tensor_type, matrices, place)


def _pack(
    library: NativeLibrary,
    parts: Iterable[Tensor],
    tensor_type: int,
    matrices: Sequence[BlockMatrix],
    place: Place,
) -> PackedWeight:
    """Pack the blocks of matrices, given in parts."""
    rows, cols = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
    # One thread per layer: other threads load other layers.
    return pack_gguf(library, parts, tensor_type, rows, cols, num_threads=1, memory=place.memory)


FORM: Final = _CpuBlocks()

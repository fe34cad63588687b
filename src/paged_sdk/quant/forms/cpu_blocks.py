"""Keep GGUF's blocks on the CPU: for the native kernels at the file's own bits per weight, without them for torch in
int8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from paged_sdk.kernels.block_groups import as_groups
from paged_sdk.kernels.gguf_blocks import BlockMatrix, stacked, tensor_type_of
from paged_sdk.kernels.native.grouped import can_be_packed, pack_grouped
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.packed import PACKED_TYPES, PackedWeight, gains_by_rotation, pack_gguf
from paged_sdk.kernels.native.quantize import quantize_blocks
from paged_sdk.kernels.native.ranks import ColumnJoin
from paged_sdk.kernels.stored_matrix import StoredMatrix
from paged_sdk.quant.embedding import BlockEmbedding, Embedding
from paged_sdk.quant.experts import ExpertExtras, Experts
from paged_sdk.quant.form import Form, Place
from paged_sdk.quant.hadamard_int8 import HadamardInt8Linear
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.native_block import NativeBlockLinear, PackedBlockEmbedding
from paged_sdk.quant.native_block_experts import NativeBlockExperts

__all__ = ["FORM"]

_ROWS_AT_ONCE: Final = 1024  # rows that are decoded at once
_PANEL_ROWS: Final = 16  # rows that are packed together
# Small enough for a core's second cache, and for memory that the allocator has at hand instead of new pages.
_BYTES_AT_ONCE: Final = 1 << 19


class _CpuBlocks(Form):
    """Holds blocks of any format; embeddings decode the rows that are looked up, and share their memory with the output
    projection that is tied to them.
    """

    def linear(
        self, matrices: Sequence[StoredMatrix], biases: Sequence[Tensor | None], place: Place, *, is_head: bool
    ) -> Linear | None:
        blocks = [matrix for matrix in matrices if isinstance(matrix, BlockMatrix)]
        if len(blocks) < len(matrices) or place.device.type != "cpu":
            return None
        if place.workspace is None:
            return HadamardInt8Linear(blocks, biases)
        library = place.workspace.library
        packed = [_packed(library, each, place) for each in blocks]
        rotate_many = not (place.one_form or is_head) and gains_by_rotation(library, packed)
        return NativeBlockLinear(place.workspace, packed, biases, rotate_many=rotate_many)

    def experts(
        self,
        gate: Sequence[StoredMatrix],
        up: Sequence[StoredMatrix],
        down: Sequence[StoredMatrix],
        place: Place,
        *,
        extras: ExpertExtras | None,
        join: ColumnJoin | None,
    ) -> Experts | None:
        stacks = [_stack(matrices) for matrices in (gate, up, down)]
        served = [stack for stack in stacks if stack is not None]
        if place.workspace is None or len(served) < len(stacks):
            return None
        packed = [_packed(place.workspace.library, stack, place) for stack in served]
        return NativeBlockExperts(place.workspace, *packed, num_experts=len(gate), extras=extras, join=join)

    def embedding(self, matrix: StoredMatrix, place: Place, *, scale: float | None) -> Embedding | None:
        if not isinstance(matrix, BlockMatrix) or place.device.type != "cpu":
            return None
        if place.workspace is None or matrix.tensor_type not in PACKED_TYPES:
            return BlockEmbedding(matrix, dtype=place.dtype, scale=scale)
        packed = _packed_as_stored(place.workspace.library, matrix, place)
        return PackedBlockEmbedding(place.workspace, packed, dtype=place.dtype, scale=scale)

    def tied_head(self, embedding: Embedding, place: Place) -> Linear | None:
        if not isinstance(embedding, PackedBlockEmbedding) or place.workspace is None:
            return None
        return NativeBlockLinear(place.workspace, [embedding.weight], [None])


def _stack(matrices: Sequence[StoredMatrix]) -> BlockMatrix | None:
    """Put matrices one below the other; return None where one is not in blocks, or not all are of one type."""
    blocks = [matrix for matrix in matrices if isinstance(matrix, BlockMatrix)]
    return stacked(blocks) if len(blocks) == len(matrices) else None


def _packed(library: NativeLibrary, matrix: BlockMatrix, place: Place) -> PackedWeight:
    """Pack the matrix for the native kernels: in its own blocks or as codes of a table; another type is converted to
    Q8_0, int8 with a scale for every 32 weights.
    """
    if matrix.tensor_type not in PACKED_TYPES:
        grouped = as_groups(matrix)
        if grouped is not None and can_be_packed([grouped]):
            # On this thread alone: other layers are loaded on the others.
            return pack_grouped(library, [grouped], num_threads=1, memory=place.memory)
        target, (rows, _) = tensor_type_of("Q8_0"), matrix.shape
        parts = [matrix.rows(slice(first, first + _ROWS_AT_ONCE)) for first in range(0, rows, _ROWS_AT_ONCE)]
        blocks = torch.cat([quantize_blocks(library, part.decoded(), target) for part in parts])
        matrix = BlockMatrix(target, blocks)
    return _packed_as_stored(library, matrix, place)


def _packed_as_stored(library: NativeLibrary, matrix: BlockMatrix, place: Place) -> PackedWeight:
    """Pack a matrix part by part, each while the processor's caches hold what has been read of it."""
    rows = max(1, _BYTES_AT_ONCE // (matrix.num_bytes // matrix.shape[0]) // _PANEL_ROWS) * _PANEL_ROWS
    parts = (part.blocks for part in matrix.parts(rows))
    # On this thread alone: other layers are loaded on the others.
    return pack_gguf(library, parts, matrix.tensor_type, *matrix.shape, num_threads=1, memory=place.memory)


FORM: Final = _CpuBlocks()

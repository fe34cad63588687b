"""Keep GGUF's blocks on the CPU: for the native kernels at the file's own bits per weight, without them for torch in
int8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from torch import Tensor

from paged_sdk.kernels.native.grouped import can_be_packed, pack_grouped
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.packed import PACKED_TYPES, PackedWeight, gains_by_rotation, pack_gguf, whole_panels
from paged_sdk.kernels.native.quantize import quantize_blocks
from paged_sdk.kernels.native.ranks import ColumnJoin
from paged_sdk.kernels.quantized.block_groups import as_groups
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix, tensor_type_of
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.quant.embedding import BlockEmbedding, Embedding
from paged_sdk.quant.experts import ExpertExtras, Experts
from paged_sdk.quant.form import Form, Place
from paged_sdk.quant.hadamard_int8 import HadamardInt8Linear
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.native_block import NativeBlockLinear, PackedBlockEmbedding
from paged_sdk.quant.native_block_experts import NativeBlockExperts

__all__ = ["FORM"]

_ROWS_AT_ONCE: Final = 1024  # rows that are decoded at once
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
        packed = [_packed(library, [each], place) for each in blocks]
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
        stacks = [_of_one_type(matrices) for matrices in (gate, up, down)]
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
        packed = _packed_as_stored(place.workspace.library, [matrix], place)
        return PackedBlockEmbedding(place.workspace, packed, dtype=place.dtype, scale=scale)

    def tied_head(self, embedding: Embedding, place: Place) -> Linear | None:
        if not isinstance(embedding, PackedBlockEmbedding) or place.workspace is None:
            return None
        return NativeBlockLinear(place.workspace, [embedding.weight], [None])


def _of_one_type(matrices: Sequence[StoredMatrix]) -> list[BlockMatrix] | None:
    """Return the matrices; None where one is not in blocks, or not all are of one type."""
    blocks = [matrix for matrix in matrices if isinstance(matrix, BlockMatrix)]
    types = {matrix.tensor_type for matrix in blocks}
    return blocks if len(blocks) == len(matrices) and len(types) == 1 else None


def _packed(library: NativeLibrary, matrices: Sequence[BlockMatrix], place: Place) -> PackedWeight:
    """Pack matrices of one type for the native kernels, one below the other: in their own blocks, or as codes of a
    table; other types are converted to Q8_0, int8 with a scale for every 32 weights.
    """
    tensor_type = matrices[0].tensor_type
    if tensor_type in PACKED_TYPES:
        return _packed_as_stored(library, matrices, place)
    grouped = [each for each in map(as_groups, matrices) if each is not None]
    if len(grouped) == len(matrices) and can_be_packed(grouped):
        # On this thread alone: other layers are loaded on the others.
        return pack_grouped(library, grouped, num_threads=1, memory=place.memory)
    target = tensor_type_of("Q8_0")
    parts = (
        quantize_blocks(library, part.decoded(), target) for matrix in matrices for part in matrix.parts(_ROWS_AT_ONCE)
    )
    return _pack(library, parts, target, matrices, place)


def _packed_as_stored(library: NativeLibrary, matrices: Sequence[BlockMatrix], place: Place) -> PackedWeight:
    """Pack matrices part by part, each while the processor's caches hold what has been read of it."""
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
    """Pack the blocks of matrices, which come in parts."""
    rows, cols = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
    # On this thread alone: other layers are loaded on the others.
    return pack_gguf(library, parts, tensor_type, rows, cols, num_threads=1, memory=place.memory)


FORM: Final = _CpuBlocks()

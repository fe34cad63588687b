"""Serve grouped matrices on the CPU, packed at their own bits for the native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.native.grouped import can_be_packed, decode_grouped, pack_grouped
from paged_sdk.kernels.native.linear import same_order
from paged_sdk.kernels.native.packed import PackedWeight, gains_in_hadamard, pack_gguf, whole_panels
from paged_sdk.kernels.native.quantize import quantize_blocks
from paged_sdk.kernels.native.ranks import ColumnJoin
from paged_sdk.kernels.quantized.gguf_blocks import tensor_type_of
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix, UnreadGroupedMatrix
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.quant.embedding import Embedding
from paged_sdk.quant.experts import ExpertExtras, Experts, Projections
from paged_sdk.quant.form import Form, Place
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.native_block import NativeBlockLinear, PackedBlockEmbedding
from paged_sdk.quant.native_block_experts import NativeBlockExperts

__all__ = ["FORM"]

_WIDTH: Final = 32  # columns that the kernels read at a time
_EXPERT_ROWS: Final = 32  # rows of an expert that are multiplied together
_NUMBERS_AT_ONCE: Final = 1 << 18  # decoded at a time: fits a core's second-level cache

_Grouped = GroupedMatrix | UnreadGroupedMatrix


class _CpuGrouped(Form):
    """Serves grouped matrices through the layers for packed blocks, tied output projections included."""

    def linear(
        self, matrices: Sequence[StoredMatrix], biases: Sequence[Tensor | None], place: Place, *, is_head: bool
    ) -> Linear | None:
        grouped = _grouped(matrices, place)
        if grouped is None or place.workspace is None:
            return None
        # Matrices that share an input must share one column order of the activations.
        as_stored = all(same_order(grouped[0].order, each.order) for each in grouped) and all(
            can_be_packed([each]) for each in grouped
        )
        packed = [_packed([each], place, as_stored=as_stored or each.order is None) for each in grouped]
        hadamard_for_many = not (place.one_form or is_head) and gains_in_hadamard(place.workspace.library, packed)
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
        stacks = matrices.try_map(lambda stack: _grouped(stack, place))
        if place.workspace is None or stacks is None or not all(map(_in_units, stacks.all)):
            return None
        # Experts read activations in the input's order, so permuted columns cannot be packed.
        packed = stacks.map(lambda stack: _packed(stack, place, as_stored=all(each.order is None for each in stack)))
        return NativeBlockExperts(
            place.workspace, packed, num_experts=len(matrices.up), extras=extras, join=join, activation=activation
        )

    def embedding(self, matrix: StoredMatrix, place: Place, *, scale: float | None) -> Embedding | None:
        grouped = _grouped([matrix], place)
        if grouped is None or place.workspace is None:
            return None
        return PackedBlockEmbedding(place.workspace, _packed(grouped, place), dtype=place.dtype, scale=scale)


def _grouped(matrices: Sequence[StoredMatrix], place: Place) -> list[_Grouped] | None:
    """Return the matrices if all are grouped and the native kernels can multiply them, else None."""
    if place.workspace is None or place.device.type != "cpu":
        return None
    grouped = [each for each in matrices if isinstance(each, GroupedMatrix | UnreadGroupedMatrix)]
    fits = all(0 not in each.shape and each.shape[1] % _WIDTH == 0 for each in grouped)
    return grouped if fits and len(grouped) == len(matrices) else None


def _in_units(experts: Sequence[_Grouped]) -> bool:
    return all(each.shape[0] % _EXPERT_ROWS == 0 for each in experts)


def _packed(matrices: Sequence[_Grouped], place: Place, *, as_stored: bool = True) -> PackedWeight:
    """Concatenate matrices along the rows and pack them. Those that cannot be packed as stored are converted to Q8_0.

    FP8 then takes 8.5 bits instead of 8, and the conversion adds 3 % to FP8's own squared error.
    """
    assert place.workspace is not None
    library, target = place.workspace.library, tensor_type_of("Q8_0")
    # One thread per layer: other threads load other layers.
    if as_stored and can_be_packed(matrices):
        return pack_grouped(library, matrices, num_threads=1, memory=place.memory)
    shape = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
    at_once = whole_panels(_NUMBERS_AT_ONCE // shape[1])
    parts = (
        quantize_blocks(library, decode_grouped(library, part, num_threads=1), target, num_threads=1)
        for matrix in matrices
        for part in matrix.parts(at_once)
    )
    return pack_gguf(library, parts, target, *shape, num_threads=1, memory=place.memory)


FORM: Final = _CpuGrouped()

"""Serve GGUF blocks on CUDA, repacked for Triton kernels. Grouped matrices, and blocks whose codes index a table, are
served if they can be converted to such blocks.

Modules that need Triton are imported when a layer is made, because forms are discovered on machines without it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.native.ranks import ColumnJoin
from paged_sdk.kernels.quantized.blocks_to_groups import as_groups
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix, stacked
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix, UnreadGroupedMatrix
from paged_sdk.kernels.quantized.groups_to_blocks import as_blocks
from paged_sdk.kernels.quantized.repack import REPACKABLE_TYPES, repack
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.quant.embedding import Embedding, TritonBlockEmbedding
from paged_sdk.quant.experts import ExpertExtras, Experts, Projections
from paged_sdk.quant.form import Form, Place
from paged_sdk.quant.linear import Linear

__all__ = ["FORM", "TritonBlocks"]


class TritonBlocks(Form):
    """Serves repacked blocks. A tied output projection shares the memory of the embeddings."""

    def is_for(self, device: torch.device) -> bool:
        """Return whether Triton kernels run on the device."""
        return device.type != "cpu"

    def linear(
        self,
        matrices: Sequence[StoredMatrix],
        biases: Sequence[Tensor | None],
        place: Place,
        *,
        is_head: bool,
    ) -> Linear | None:
        blocks = self._repackable(matrices, place)
        if blocks is None:
            return None
        from paged_sdk.quant.triton_block import TritonBlockLinear

        return TritonBlockLinear(blocks, biases, device=place.device)

    def experts(
        self,
        matrices: Projections[Sequence[StoredMatrix]],
        place: Place,
        *,
        extras: ExpertExtras | None,
        join: ColumnJoin | None,
        activation: KernelActivation,
    ) -> Experts | None:
        if extras is not None or join is not None:  # not supported by the kernels
            return None
        repackable = matrices.try_map(lambda each: self._repackable(each, place))
        stacks = None if repackable is None else repackable.try_map(stacked)
        if stacks is None:
            return None
        from paged_sdk.quant.triton_block_experts import TritonBlockExperts

        return TritonBlockExperts(stacks, num_experts=len(matrices.up), device=place.device, activation=activation)

    def embedding(self, matrix: StoredMatrix, place: Place, *, scale: float | None) -> Embedding | None:
        blocks = self._repackable([matrix], place)
        if blocks is None:
            return None
        return TritonBlockEmbedding(repack(blocks[0].to(place.device)), dtype=place.dtype, scale=scale)

    def tied_head(self, embedding: Embedding, place: Place) -> Linear | None:
        if not isinstance(embedding, TritonBlockEmbedding):
            return None
        from paged_sdk.quant.triton_block import TritonBlockLinear

        return TritonBlockLinear([embedding.matrix], [None], device=place.device)

    def _repackable(self, matrices: Sequence[StoredMatrix], place: Place) -> list[BlockMatrix] | None:
        """Return the matrices as blocks; None if one cannot be repacked, or the device is not served."""
        if not self.is_for(place.device):
            return None
        blocks: list[BlockMatrix] = []
        for matrix in matrices:
            in_blocks = matrix if isinstance(matrix, BlockMatrix) else None
            grouped = matrix if isinstance(matrix, GroupedMatrix | UnreadGroupedMatrix) else None
            if in_blocks is not None and in_blocks.tensor_type not in REPACKABLE_TYPES:
                grouped = as_groups(in_blocks)
            if grouped is not None:
                in_blocks = as_blocks(grouped.to(place.device))
            if in_blocks is None or in_blocks.tensor_type not in REPACKABLE_TYPES:
                return None
            blocks.append(in_blocks)
        return blocks


FORM: Final = TritonBlocks()

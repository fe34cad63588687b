"""Repack GGUF's blocks on CUDA for Triton's kernels. Types that cannot be repacked are not served.

Modules that need Triton are imported when a layer is made, because forms are also found on machines without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from paged_sdk.kernels.gguf_blocks import BlockMatrix, stacked
from paged_sdk.kernels.repack import REPACKABLE_TYPES, repack
from paged_sdk.kernels.stored_matrix import StoredMatrix
from paged_sdk.quant.embedding import Embedding, TritonBlockEmbedding
from paged_sdk.quant.experts import Experts
from paged_sdk.quant.form import Form, Place
from paged_sdk.quant.linear import Linear

__all__ = ["FORM", "TritonBlocks"]


class TritonBlocks(Form):
    """Holds repacked blocks; an output projection that is tied to the embeddings shares their memory."""

    def is_for(self, device: torch.device) -> bool:
        """Return whether Triton's kernels run in this place."""
        return device.type != "cpu"

    def linear(
        self,
        matrices: Sequence[StoredMatrix],
        biases: Sequence[Tensor | None],
        place: Place,
        *,
        is_head: bool,
    ) -> Linear | None:
        blocks = _repackable(matrices)
        if blocks is None or not self.is_for(place.device):
            return None
        from paged_sdk.quant.triton_block import TritonBlockLinear

        return TritonBlockLinear(blocks, biases, device=place.device)

    def experts(
        self, gate: Sequence[StoredMatrix], up: Sequence[StoredMatrix], down: Sequence[StoredMatrix], place: Place
    ) -> Experts | None:
        if not self.is_for(place.device):
            return None
        repackable = [_repackable(matrices) for matrices in (gate, up, down)]
        match [stacked(blocks) for blocks in repackable if blocks is not None]:
            case [BlockMatrix() as gate_stack, BlockMatrix() as up_stack, BlockMatrix() as down_stack]:
                from paged_sdk.quant.triton_block_experts import TritonBlockExperts

                return TritonBlockExperts(gate_stack, up_stack, down_stack, num_experts=len(gate), device=place.device)
            case _:
                return None

    def embedding(self, matrix: StoredMatrix, place: Place, *, scale: float | None) -> Embedding | None:
        blocks = _repackable([matrix])
        if blocks is None or not self.is_for(place.device):
            return None
        return TritonBlockEmbedding(repack(blocks[0].to(place.device)), dtype=place.dtype, scale=scale)

    def tied_head(self, embedding: Embedding, place: Place) -> Linear | None:
        if not isinstance(embedding, TritonBlockEmbedding):
            return None
        from paged_sdk.quant.triton_block import TritonBlockLinear

        return TritonBlockLinear([embedding.matrix], [None], device=place.device)


def _repackable(matrices: Sequence[StoredMatrix]) -> list[BlockMatrix] | None:
    """Return the matrices; None where one is not in blocks, or of a type that cannot be repacked."""
    blocks = [each for each in matrices if isinstance(each, BlockMatrix) and each.tensor_type in REPACKABLE_TYPES]
    return blocks if len(blocks) == len(matrices) else None


FORM: Final = TritonBlocks()

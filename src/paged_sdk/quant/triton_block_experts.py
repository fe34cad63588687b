"""Compute experts in GGUF blocks, repacked for GPUs at the file's own bits per weight, by Triton kernels. Import this
module only where Triton is installed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.kernels.quantized.repack import repack
from paged_sdk.kernels.triton.quantized_experts import quantized_experts
from paged_sdk.quant.experts import Experts

__all__ = ["TritonBlockExperts"]


class TritonBlockExperts(Experts):
    """Holds one stack of repacked matrices per projection; the types of the stacks may differ.

    :param gate: ``[num_experts * intermediate_size, hidden_size]``, of a type in
        :data:`~paged_sdk.kernels.quantized.repack.REPACKABLE_TYPES`
    :param up: likewise
    :param down: ``[num_experts * hidden_size, intermediate_size]``
    :param device: the device for the weights
    """

    def __init__(
        self, gate: BlockMatrix, up: BlockMatrix, down: BlockMatrix, *, num_experts: int, device: torch.device
    ) -> None:
        self._gate, self._up, self._down = (
            repack(BlockMatrix(matrix.tensor_type, matrix.blocks.to(device))) for matrix in (gate, up, down)
        )
        self._num_experts = num_experts

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all experts."""
        return self._gate.num_bytes + self._up.num_bytes + self._down.num_bytes

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Implement :meth:`Experts.forward`, in float32, float16 or bfloat16."""
        return quantized_experts(
            x, self._gate, self._up, self._down, topk_weights, topk_ids, num_experts=self._num_experts
        )

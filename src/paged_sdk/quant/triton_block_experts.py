"""Compute experts in GGUF blocks, repacked for GPUs at the file's own bits per weight, by Triton kernels. Import this
module only where Triton is installed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.kernels.quantized.repack import repack
from paged_sdk.kernels.triton.quantized_experts import quantized_experts
from paged_sdk.quant.experts import Experts, Projections

__all__ = ["TritonBlockExperts"]


class TritonBlockExperts(Experts):
    """Holds one stack of repacked matrices per projection; the types of the stacks may differ.

    :param stacks: of types in :data:`~paged_sdk.kernels.quantized.repack.REPACKABLE_TYPES`: gate and up
        ``[num_experts * intermediate_size, hidden_size]``, and down ``[num_experts * hidden_size, intermediate_size]``
    :param device: the device for the weights
    :param activation: of the gates, or without gates of up
    """

    def __init__(
        self,
        stacks: Projections[BlockMatrix],
        *,
        num_experts: int,
        device: torch.device,
        activation: KernelActivation = "silu",
    ) -> None:
        self._stacks = stacks.map(lambda each: repack(BlockMatrix(each.tensor_type, each.blocks.to(device))))
        self._num_experts = num_experts
        self._activation: KernelActivation = activation

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all experts."""
        return sum(each.num_bytes for each in self._stacks.all)

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Implement :meth:`Experts.forward`, in float32, float16 or bfloat16."""
        return quantized_experts(
            x,
            self._stacks.gate,
            self._stacks.up,
            self._stacks.down,
            topk_weights,
            topk_ids,
            num_experts=self._num_experts,
            activation=self._activation,
        )

"""Compute experts whose weights are in the model's dtype."""

from __future__ import annotations

from torch import Tensor

from paged_sdk.kernels.fused_moe import fused_moe
from paged_sdk.quant.experts import Experts

__all__ = ["DenseExperts"]


class DenseExperts(Experts):
    """Computes experts with weights in the model's dtype.

    :param gate_up: ``[num_experts, 2 * intermediate_size, hidden_size]``, gate's rows, then up's
    :param down: ``[num_experts, hidden_size, intermediate_size]``
    """

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self.gate_up = gate_up
        self.down = down

    @property
    def num_bytes(self) -> int:
        """Return bytes of all experts."""
        return self.gate_up.nbytes + self.down.nbytes

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Do what :meth:`Experts.forward` says."""
        return fused_moe(x, self.gate_up, self.down, topk_weights, topk_ids)

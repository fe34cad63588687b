"""Define the interface of every form of a mixture's experts, as :mod:`paged_sdk.quant.linear` does for one matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod

from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.native.packed import PackedWeight

__all__ = ["ExpertExtras", "Experts", "NativeExpertWeights"]


@frozen(eq=False, kw_only=True)
class ExpertExtras:
    """Holds what experts have that compute ``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped factors, with biases.

    :ivar gate_bias: ``[num_experts, intermediate_size]`` in the model's dtype; ``up_bias`` likewise
    :ivar down_bias: ``[num_experts, hidden_size]``
    :ivar alpha: multiplies the gate within its sigmoid
    :ivar limit: the largest gate, and the largest magnitude of up
    """

    gate_bias: Tensor
    up_bias: Tensor
    down_bias: Tensor
    alpha: float
    limit: float


@frozen(eq=False, kw_only=True)
class NativeExpertWeights:
    """Holds the matrices of all experts as the native CPU kernels multiply them.

    :ivar gate: ``[num_experts * intermediate_size, hidden_size]``; of ranks that join columns, this one's rows of each
        expert's
    :ivar up: likewise
    :ivar down: ``[num_experts * hidden_size, intermediate_size]``, likewise
    :ivar extras: None: experts are SwiGLU without biases
    """

    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    extras: ExpertExtras | None = None


class Experts(ABC):
    """Computes gated MLPs (SwiGLU), of which each token uses a few, however their weights are kept."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Return how many bytes the weights take."""

    @property
    def native_weights(self) -> NativeExpertWeights | None:
        """Return what a native call that fuses several layers multiplies by; None: this form has no native kernel."""
        return None

    @abstractmethod
    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Compute ``sum of weight * down @ (silu(gate @ x) * (up @ x))`` over each token's experts.

        :param x: ``[num_tokens, hidden_size]`` of the model's dtype
        :param topk_weights: ``[num_tokens, num_selected]`` float32
        :param topk_ids: likewise, int64
        :returns: ``[num_tokens, rows of an expert's down]`` of the dtype of ``x``
        """

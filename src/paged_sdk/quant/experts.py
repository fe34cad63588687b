"""Define the interface of a layer's experts, however their weights are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod

from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.activation import GatedActivation
from paged_sdk.kernels.native.packed import PackedWeight

__all__ = ["ExpertExtras", "Experts", "NativeExpertWeights"]


@frozen(eq=False, kw_only=True)
class ExpertExtras:
    """Holds the parameters of experts that compute ``(up + 1) * gate * sigmoid(alpha * gate)``, with clamps and biases.

    :ivar gate_bias: ``[num_experts, intermediate_size]`` in the model's dtype
    :ivar up_bias: likewise
    :ivar down_bias: ``[num_experts, hidden_size]``
    :ivar alpha: multiplies the gate in the sigmoid
    :ivar limit: the upper bound of the gate, and of the magnitude of up
    """

    gate_bias: Tensor
    up_bias: Tensor
    down_bias: Tensor
    alpha: float
    limit: float


@frozen(eq=False, kw_only=True)
class NativeExpertWeights:
    """Holds the packed matrices of all experts, for the native CPU kernels.

    :ivar gate: ``[num_experts * intermediate_size, hidden_size]``; if ranks join columns, this rank's rows of each
        expert
    :ivar up: likewise
    :ivar down: ``[num_experts * hidden_size, intermediate_size]``, likewise
    :ivar extras: None: no biases, and ``activation``
    :ivar activation: of the gates
    """

    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    extras: ExpertExtras | None = None
    activation: GatedActivation = "silu"


class Experts(ABC):
    """Computes a mixture of gated MLPs, of which each token uses a few, however their weights are stored."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Return the bytes of the weights."""

    @property
    def native_weights(self) -> NativeExpertWeights | None:
        """Return the weights for a native call that fuses several layers; None: this form has no native kernel."""
        return None

    @abstractmethod
    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Compute ``sum of weight * down @ (activation(gate @ x) * (up @ x))`` over each token's experts.

        :param x: ``[num_tokens, hidden_size]`` of the model's dtype
        :param topk_weights: ``[num_tokens, num_selected]`` float32
        :param topk_ids: ``[num_tokens, num_selected]`` int64
        :returns: ``[num_tokens, rows of an expert's down]`` of the dtype of ``x``
        """

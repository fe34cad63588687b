"""Define the interface of a layer's experts, however their weights are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.native.packed import PackedWeight

__all__ = ["ExpertExtras", "Experts", "NativeExpertWeights", "Projections"]

_T = TypeVar("_T")
_U = TypeVar("_U")


@frozen(eq=False)
class Projections(Generic[_T]):
    """Holds something of each projection of a layer's experts, such as the matrices of all of them.

    :ivar gate: None: experts have no gates, and ``up`` is activated
    """

    gate: _T | None
    up: _T
    down: _T

    @property
    def all(self) -> tuple[_T, ...]:
        """Return what there is, in the order of the projections."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)

    def map(self, make: Callable[[_T], _U]) -> Projections[_U]:
        """Return what ``make`` makes of each projection."""
        return Projections(None if self.gate is None else make(self.gate), make(self.up), make(self.down))

    def try_map(self, make: Callable[[_T], _U | None]) -> Projections[_U] | None:
        """Return what ``make`` makes of each projection; None if it makes nothing of one of them."""
        gate, up, down = None if self.gate is None else make(self.gate), make(self.up), make(self.down)
        if up is None or down is None or (gate is None) != (self.gate is None):
            return None
        return Projections(gate, up, down)


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
        expert. None: experts have no gates
    :ivar up: likewise
    :ivar down: ``[num_experts * hidden_size, intermediate_size]``, likewise
    :ivar extras: None: no biases, and ``activation``
    :ivar activation: of the gates, or without gates of up
    """

    gate: PackedWeight | None
    up: PackedWeight
    down: PackedWeight
    extras: ExpertExtras | None = None
    activation: KernelActivation = "silu"


class Experts(ABC):
    """Computes a mixture of MLPs, with gates or without, of which each token uses a few.

    Subclasses differ in how weights are stored.
    """

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
        """Compute ``sum of weight * down @ (activation(gate @ x) * (up @ x))`` over each token's experts, or
        ``sum of weight * down @ activation(up @ x)`` without gates.

        :param x: ``[num_tokens, hidden_size]`` of the model's dtype
        :param topk_weights: ``[num_tokens, num_selected]`` float32
        :param topk_ids: ``[num_tokens, num_selected]`` int64
        :returns: ``[num_tokens, rows of an expert's down]`` of the dtype of ``x``
        """

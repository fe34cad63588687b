"""Compute experts packed for the native kernels: quantized at the file's own bits per weight, or dense."""

from __future__ import annotations

from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.native.experts import NativeExperts
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.packed import PackedWeight
from paged_sdk.kernels.native.ranks import ColumnJoin
from paged_sdk.quant.experts import ExpertExtras, Experts, NativeExpertWeights, Projections

__all__ = ["NativeBlockExperts"]


class NativeBlockExperts(Experts):
    """Holds one stack of packed matrices per projection.

    Unlike :class:`~paged_sdk.quant.native_block.NativeBlockLinear`, there is no second form for many rows: each expert
    gets only a few of a prompt's tokens.

    :param workspace: the calling engine's workspace
    :param weights: gate and up ``[num_experts * intermediate_size, hidden_size]``, and down ``[num_experts *
        hidden_size, intermediate_size]``
    :param extras: None: no biases, and ``activation``
    :param join: see :class:`~paged_sdk.kernels.native.experts.NativeExperts`; ``activation`` likewise
    """

    def __init__(
        self,
        workspace: Workspace,
        weights: Projections[PackedWeight],
        *,
        num_experts: int,
        extras: ExpertExtras | None,
        join: ColumnJoin | None,
        activation: KernelActivation = "silu",
    ) -> None:
        gate, up, down = weights.gate, weights.up, weights.down
        self._native = NativeExpertWeights(gate=gate, up=up, down=down, extras=extras, activation=activation)
        self._experts = NativeExperts(
            workspace, gate, up, down, num_experts=num_experts, join=join, activation=activation
        )
        if extras is not None:
            self._experts.extend(
                (extras.gate_bias, extras.up_bias, extras.down_bias), alpha=extras.alpha, limit=extras.limit
            )

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all experts."""
        return self._experts.num_bytes

    @property
    def native_weights(self) -> NativeExpertWeights:
        """Implement :attr:`Experts.native_weights`."""
        return self._native

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Implement :meth:`Experts.forward`, in float32, bfloat16 or float16."""
        return self._experts(x, topk_weights, topk_ids)

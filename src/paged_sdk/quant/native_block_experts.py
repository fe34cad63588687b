"""Compute experts in the native kernels' layout: at a file's own bits per weight, or dense."""

from __future__ import annotations

from torch import Tensor

from paged_sdk.kernels.native.experts import NativeExperts
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.packed import PackedWeight
from paged_sdk.kernels.native.ranks import ColumnJoin
from paged_sdk.quant.experts import ExpertExtras, Experts, NativeExpertWeights

__all__ = ["NativeBlockExperts"]


class NativeBlockExperts(Experts):
    """Holds stacks of packed matrices, one for each projection.

    There is no second form for many rows, as :class:`~paged_sdk.quant.native_block.NativeBlockLinear` has it: experts
    are nearly all of a model's weights, and each expert gets only a few of a prompt's tokens.

    :param workspace: the workspace of the engine that calls
    :param gate: ``[num_experts * intermediate_size, hidden_size]``
    :param up: likewise
    :param down: ``[num_experts * hidden_size, intermediate_size]``
    :param extras: None: experts are SwiGLU without biases
    :param join: see :class:`~paged_sdk.kernels.native.experts.NativeExperts`
    """

    def __init__(
        self,
        workspace: Workspace,
        gate: PackedWeight,
        up: PackedWeight,
        down: PackedWeight,
        *,
        num_experts: int,
        extras: ExpertExtras | None,
        join: ColumnJoin | None,
    ) -> None:
        self._native = NativeExpertWeights(gate=gate, up=up, down=down, extras=extras)
        self._experts = NativeExperts(workspace, gate, up, down, num_experts=num_experts, join=join)
        if extras is not None:
            self._experts.extend(
                (extras.gate_bias, extras.up_bias, extras.down_bias), alpha=extras.alpha, limit=extras.limit
            )

    @property
    def num_bytes(self) -> int:
        """Return bytes of all experts."""
        return self._experts.num_bytes

    @property
    def native_weights(self) -> NativeExpertWeights:
        """Do what :attr:`Experts.native_weights` says."""
        return self._native

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Do what :meth:`Experts.forward` says, in float32, bfloat16 or float16."""
        return self._experts(x, topk_weights, topk_ids)

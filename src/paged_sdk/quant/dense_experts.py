"""Compute experts whose weights are in the model's dtype."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation, inner_activation_reference
from paged_sdk.kernels.fused_moe import fused_moe
from paged_sdk.kernels.native.ranks import ColumnJoin
from paged_sdk.quant.experts import ExpertExtras, Experts

__all__ = ["DenseExperts"]


class DenseExperts(Experts):
    """Computes experts with weights in the model's dtype.

    :param gate_up: ``[num_experts, 2 * intermediate_size, hidden_size]``, gate's rows, then up's; without gates up's
        alone
    :param down: ``[num_experts, hidden_size, intermediate_size]``
    :param extras: None: no biases, and ``activation``
    :param activation: of the gates, or without gates of up
    :param is_gated: whether experts have gates
    :param join: on the CPU, gathers the inner activations of all ranks before ``down``: ``gate_up`` has the rows of
        this rank's neurons, ``down`` some rows and all columns; None: no gather
    """

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        extras: ExpertExtras | None = None,
        join: ColumnJoin | None = None,
        *,
        activation: KernelActivation = "silu",
        is_gated: bool = True,
    ) -> None:
        self.activation: KernelActivation = activation
        self.is_gated = is_gated
        self.gate_up = gate_up
        self.down = down
        self.extras = extras
        self.join = join

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all experts."""
        return self.gate_up.nbytes + self.down.nbytes

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Implement :meth:`Experts.forward`."""
        if self.join is not None:
            return self._forward_joined(x, topk_weights, topk_ids, self.join)
        if self.extras is None:
            return fused_moe(x, self.gate_up, self.down, topk_weights, topk_ids, self.activation)
        return self._forward_extended(x, topk_weights, topk_ids)

    def _forward_joined(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, join: ColumnJoin) -> Tensor:
        """Compute the same as :func:`fused_moe_reference`, one expert at a time: first this rank's inner activations,
        then, after the gather, all outputs.
        """
        order = topk_ids.flatten().argsort(stable=True)
        tokens, weights = order // topk_ids.shape[1], topk_weights.flatten()[order].unsqueeze(-1)
        counts = topk_ids.flatten().bincount(minlength=len(self.gate_up)).tolist()
        used = [
            (expert, slice(end - count, end))
            for expert, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True))
            if count
        ]
        own = x.new_empty(len(tokens), self.gate_up.shape[1] // (2 if self.is_gated else 1))
        for expert, pairs in used:
            own[pairs] = self.inner(x[tokens[pairs]], expert)
        whole = join(own)
        wide = torch.promote_types(x.dtype, torch.float32)
        out = torch.zeros(len(x), self.down.shape[1], dtype=wide)
        for expert, pairs in used:
            out.index_add_(0, tokens[pairs], (self._outputs(whole[pairs], expert) * weights[pairs]).to(wide))
        return out.to(x.dtype)

    def _forward_extended(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Compute every expert for all tokens, one expert at a time. The host never reads which experts are selected,
        so that a CUDA graph can record the computation.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        used = torch.zeros(len(x), len(self.gate_up), dtype=wide, device=x.device)
        used.scatter_(1, topk_ids, topk_weights.to(wide))
        out = torch.zeros_like(x, dtype=wide)
        for expert in range(len(self.gate_up)):
            out += self._outputs(self.inner(x, expert), expert) * used[:, expert, None]
        return out.to(x.dtype)

    def inner(self, x: Tensor, expert: int) -> Tensor:
        """Compute what one expert's ``down`` multiplies, of rows of the input, ``[rows, hidden_size]``."""
        gate_up = F.linear(x, self.gate_up[expert])
        if (extras := self.extras) is None:
            return inner_activation_reference(gate_up, self.activation, is_gated=self.is_gated)
        gate, up = gate_up.chunk(2, -1)
        gate = (gate + extras.gate_bias[expert]).clamp(max=extras.limit)
        up = (up + extras.up_bias[expert]).clamp(-extras.limit, extras.limit)
        return (up + 1) * gate * torch.sigmoid(extras.alpha * gate)

    def _outputs(self, inner: Tensor, expert: int) -> Tensor:
        mapped = F.linear(inner, self.down[expert])
        return mapped if self.extras is None else mapped + self.extras.down_bias[expert]

"""Compute experts whose weights are in the model's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.kernels.fused_moe import fused_moe
from paged_sdk.quant.experts import ExpertExtras, Experts

__all__ = ["DenseExperts"]


class DenseExperts(Experts):
    """Computes experts with weights in the model's dtype.

    :param gate_up: ``[num_experts, 2 * intermediate_size, hidden_size]``, gate's rows, then up's
    :param down: ``[num_experts, hidden_size, intermediate_size]``
    :param extras: None: experts are SwiGLU without biases
    """

    def __init__(self, gate_up: Tensor, down: Tensor, extras: ExpertExtras | None = None) -> None:
        self.gate_up = gate_up
        self.down = down
        self.extras = extras

    @property
    def num_bytes(self) -> int:
        """Return bytes of all experts."""
        return self.gate_up.nbytes + self.down.nbytes

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Do what :meth:`Experts.forward` says."""
        if self.extras is None:
            return fused_moe(x, self.gate_up, self.down, topk_weights, topk_ids)
        return self._forward_extended(x, topk_weights, topk_ids, self.extras)

    def _forward_extended(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, extras: ExpertExtras) -> Tensor:
        """Compute every expert of all tokens one after the other: which of them a token uses is never asked on the
        host, so that a CUDA graph can record it.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        used = torch.zeros(len(x), len(self.gate_up), dtype=wide, device=x.device)
        used.scatter_(1, topk_ids, topk_weights.to(wide))
        out = torch.zeros_like(x, dtype=wide)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = F.linear(x, gate_up).chunk(2, -1)
            gate = (gate + extras.gate_bias[expert]).clamp(max=extras.limit)
            up = (up + extras.up_bias[expert]).clamp(-extras.limit, extras.limit)
            hidden = (up + 1) * gate * torch.sigmoid(extras.alpha * gate)
            out += (F.linear(hidden, down) + extras.down_bias[expert]) * used[:, expert, None]
        return out.to(x.dtype)

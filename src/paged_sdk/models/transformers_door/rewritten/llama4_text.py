"""Rewrites the mixtures of experts of Llama 4, which compute every expert for every token."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

from paged_sdk.models.transformers_door.seam import mixture

__all__ = ["REWRITTEN"]


class _Experts(Llama4TextExperts):
    """Describes its experts to transformers' interface for them."""

    has_gate: Final = True
    has_bias: Final = False
    has_post_expert_norm: Final = False
    is_concatenated: Final = True
    is_transposed: Final = True

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gated: Tensor = self.act_fn(gate) * up
        return gated


class _Mixture(Llama4TextMoe):
    """Computes the chosen experts alone. A router's score multiplies an expert's input, not its output."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of ``[1, num_tokens, hidden_size]`` as ``[num_tokens, hidden_size]``, and the router's."""
        hidden = hidden_states.reshape(-1, self.hidden_dim)
        scores, router_logits = self.router(hidden)
        out: Tensor = self.shared_expert(hidden)
        for score, chosen in zip(*(each.split(1, dim=1) for each in scores.topk(self.top_k, dim=1)), strict=True):
            out = out + mixture(self.experts, hidden * score, chosen, torch.ones_like(score))
        return out, router_logits


REWRITTEN: Final = {Llama4TextExperts: _Experts, Llama4TextMoe: _Mixture}

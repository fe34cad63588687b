"""Rewrites MPNet's modules (Song et al., 2020, arXiv 2004.09297)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention

from paged_sdk.kernels.relative_bias import RelativeBias
from paged_sdk.models.transformers_door.seam import POSITION_BIAS, attention

__all__ = ["REWRITTEN"]

_REACH: Final = 128
"""Distance from which on all have one bucket in each direction."""


class _SelfAttention(MPNetSelfAttention):
    """Calls the attention interface."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: object = None,
        position_bias: object = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor]:
        """Attend within ``[1, num_tokens, hidden_size]``."""
        heads = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        query, key, value = (each(hidden_states).view(heads).transpose(1, 2) for each in (self.q, self.k, self.v))
        options = {"scaling": self.attention_head_size**-0.5, POSITION_BIAS: position_bias}
        attended = attention(self, query, key, value, attention_mask, **options)
        return (self.o(attended.flatten(2)),)


class _Encoder(MPNetEncoder):
    """Gives its layers the numbers of distances, not those of all pairs of tokens."""

    def compute_position_bias(self, x: Tensor, position_ids: object = None, num_buckets: int = 32) -> RelativeBias:
        """Return what is added to scores."""
        distances = torch.arange(-_REACH, _REACH + 1, device=x.device)
        bucket_of: Callable[..., Tensor] = self.relative_position_bucket
        buckets = bucket_of(distances, num_buckets=num_buckets, max_distance=_REACH)
        return RelativeBias(buckets, self.relative_attention_bias.weight.T.float())


REWRITTEN: Final = {MPNetSelfAttention: _SelfAttention, MPNetEncoder: _Encoder}

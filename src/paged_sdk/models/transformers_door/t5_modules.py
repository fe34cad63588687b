"""Define what the rewritten modules of T5 and its like (Raffel et al., 2019, arXiv 1910.10683) have in common.

The classes go before those of transformers, whose attributes they use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paged_sdk.kernels.relative_bias import RelativeBias

__all__ = ["BiasByDistance", "Gated", "Plain"]


class BiasByDistance:
    """Gives attention the numbers of distances, not those of all pairs of tokens.

    All distances from ``relative_attention_max_distance`` on have one bucket in each direction.
    """

    def compute_bias(
        self: Any, query_length: int, key_length: int, device: object = None, past_seen_tokens: int = 0
    ) -> RelativeBias:
        """Return what is added to scores."""
        reach, weight = self.relative_attention_max_distance, self.relative_attention_bias.weight
        return RelativeBias(self.buckets(torch.arange(-reach, reach + 1, device=weight.device)), weight.T.float())

    def buckets(self: Any, distances: Tensor) -> Tensor:
        """Return the bucket of each distance."""
        found: Tensor = self._relative_position_bucket(
            distances,
            bidirectional=not self.is_decoder,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )
        return found


class Plain:
    """Calls the layers of an MLP without reading their weights, which may have any form."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """Apply the MLP."""
        return _down(self.wo, self.act(self.wi(hidden_states)))


class Gated:
    """Does the same as :class:`Plain` for a gated MLP."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """Apply the MLP."""
        return _down(self.wo, self.act(self.wi_0(hidden_states)) * self.wi_1(hidden_states))


def _down(layer: nn.Module, hidden: Tensor) -> Tensor:
    """Apply an MLP's last layer, which the classes keep in float32 beside float16."""
    product: Tensor = layer(hidden.to(layer.weight.dtype) if type(layer) is nn.Linear else hidden)
    return product

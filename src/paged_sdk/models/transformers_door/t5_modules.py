"""Define what T5 and its like (Raffel et al., 2019, arXiv 1910.10683) have in common, to rewrite their modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paged_sdk.kernels.relative_bias import RelativeBias

__all__ = ["BiasByDistance", "Gated", "Plain"]


class BiasByDistance:
    """Gives attention the numbers of distances, not those of all pairs of tokens; goes before the class's module.

    All distances from ``relative_attention_max_distance`` on have one bucket in each direction.
    """

    relative_attention_bias: nn.Embedding
    relative_attention_max_distance: int
    relative_attention_num_buckets: int
    is_decoder: bool
    _relative_position_bucket: Callable[..., Tensor]

    def compute_bias(self, query_length: int, key_length: int, device: Any = None, **_: Any) -> RelativeBias:
        """Return what is added to scores."""
        reach, weight = self.relative_attention_max_distance, self.relative_attention_bias.weight
        return RelativeBias(self._buckets(torch.arange(-reach, reach + 1, device=weight.device)), weight.T.float())

    def _buckets(self, distances: Tensor) -> Tensor:
        reach, count = self.relative_attention_max_distance, self.relative_attention_num_buckets
        return self._relative_position_bucket(
            distances, bidirectional=not self.is_decoder, num_buckets=count, max_distance=reach
        )


class Plain:
    """Calls the layers of an MLP without reading their weights, which may have any form."""

    wi: Callable[[Tensor], Tensor]
    act: Callable[[Tensor], Tensor]
    wo: nn.Module

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the MLP."""
        return _down(self.wo, self.act(self.wi(hidden_states)))


class Gated:
    """Does the same as :class:`Plain` for a gated MLP."""

    wi_0: Callable[[Tensor], Tensor]
    wi_1: Callable[[Tensor], Tensor]
    act: Callable[[Tensor], Tensor]
    wo: nn.Module

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the MLP."""
        return _down(self.wo, self.act(self.wi_0(hidden_states)) * self.wi_1(hidden_states))


def _down(layer: nn.Module, hidden: Tensor) -> Tensor:
    """Apply an MLP's last layer, which the classes keep in float32 beside float16."""
    product: Tensor = layer(hidden.to(layer.weight.dtype) if type(layer) is nn.Linear else hidden)
    return product

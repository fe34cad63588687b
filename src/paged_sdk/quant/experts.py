"""The seam for every form of a mixture's experts, as :mod:`paged_sdk.quant.linear` is for one matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

__all__ = ["Experts"]


class Experts(ABC):
    """Gated MLPs (SwiGLU), of which each token uses a few, however their weights are kept."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes held."""

    @abstractmethod
    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """``sum of weight * down @ (silu(gate @ x) * (up @ x))`` over each token's experts.

        :param x: ``[num_tokens, hidden_size]`` of the model's dtype
        :param topk_weights: ``[num_tokens, num_selected]`` float32
        :param topk_ids: likewise, int64
        :returns: like ``x``
        """

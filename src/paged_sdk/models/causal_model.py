"""Define the interface between runner and model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paged_sdk.config.pooling import Pooling
from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.kernels.step import StepContext

__all__ = ["CausalModel", "GreedyModel", "RankLayers", "RankingModel"]


class CausalModel(Protocol):
    """Computes logits from token ids."""

    @property
    def device(self) -> torch.device:
        """Return the device that holds the weights."""
        ...

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Run all layers over the tokens of a step.

        :param token_ids: ``[num_tokens]`` int64, of all rows in order
        :param positions: ``[num_tokens]`` int64, the position of each token within its sequence; ``[3, num_tokens]``:
            its rotary positions in time, height and width
        :returns: ``[num_tokens, hidden_size]``, as :meth:`logits` takes them; only rows of tokens whose logits the step
            asks for (:attr:`~paged_sdk.types.step.StepRow.num_logits`) are defined
        """
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the inputs of the output projection: hidden states after the last norm.

        :param hidden: some rows of :meth:`forward`'s result, ``[num_rows, hidden_size]``
        :returns: ``[num_rows, hidden_size]`` float32
        """
        ...

    def logits(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """Compute logits.

        :param hidden: some rows of :meth:`forward`'s result, ``[num_rows, hidden_size]``
        :param adapted: each row's adapter; None: no adapter updates the output projection
        :returns: ``[num_rows, vocab_size]`` float32, which the caller may change
        """
        ...


@runtime_checkable
class GreedyModel(Protocol):
    """Describes a model that finds the likeliest tokens itself, for steps that need nothing else of their logits."""

    def likeliest(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """Return the token with each row's largest logit, the lowest if several are equal.

        :param hidden: as for :meth:`CausalModel.logits`
        :param adapted: likewise
        :returns: int64 ``[num_rows]``, :data:`~paged_sdk.kernels.sampling.NOT_DRAWN` where a logit is NaN or the
            largest is not finite
        """
        ...


class RankLayers(Protocol):
    """Computes a text's score by the layers that a ranking model has instead of an output projection."""

    @property
    def pooling(self) -> Pooling:
        """Return how a text's hidden states are pooled to the vector that the layers read."""
        ...

    @property
    def takes_token_types(self) -> bool:
        """Return whether the model takes token type ids, which tell a pair's first text from the second."""
        ...

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Return the layers' tensors, by their names in the checkpoint."""
        ...

    def ranks(self, vectors: Tensor, replaced: Mapping[str, Tensor] | None = None) -> Tensor:
        """Compute the score of each vector: the larger, the better.

        :param vectors: pooled hidden states, float32 ``[num_texts, hidden_size]``
        :param replaced: tensors to use instead of some of :attr:`tensors`, of the same shapes; None: none
        :returns: ``[num_texts, 1]`` float32
        """
        ...


@runtime_checkable
class RankingModel(Protocol):
    """Describes a model that may have ranking layers."""

    @property
    def rank_head(self) -> RankLayers | None:
        """Return the ranking layers; None if the checkpoint has none."""
        ...

"""Define what the runner asks of a model, however its layers are computed."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paged_sdk.config.pooling import Pooling
from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.kernels.step import StepContext

__all__ = ["CausalModel", "RankLayers", "RankingModel"]


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
        :returns: ``[num_tokens, hidden_size]``, of which :meth:`logits` takes the rows of tokens whose logits the
            step asked for (:attr:`~paged_sdk.types.step.StepRow.num_logits`); others may hold anything
        """
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """Return hidden states as the output projection reads them: after the last norm.

        :param hidden: as for :meth:`logits`
        :returns: ``[num_rows, hidden_size]`` float32
        """
        ...

    def logits(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """Compute scores over the vocabulary.

        :param hidden: some rows of :meth:`forward`'s result, ``[num_rows, hidden_size]``
        :param adapted: which adapter each of them goes through, where one has an update of the output projection
        :returns: ``[num_rows, vocab_size]`` float32, which the caller may change
        """
        ...


class RankLayers(Protocol):
    """Makes one number of a text, by the layers that a class for ranking has in its output projection's place."""

    @property
    def pooling(self) -> Pooling:
        """Return which vector of a text they read."""
        ...

    @property
    def tells_parts(self) -> bool:
        """Say whether the model is told which of two texts a token is of."""
        ...

    def ranks(self, vectors: Tensor) -> Tensor:
        """Make one number of each vector: the larger, the better.

        :param vectors: pooled hidden states, float32 ``[num_texts, hidden_size]``
        :returns: ``[num_texts, 1]`` float32
        """
        ...


@runtime_checkable
class RankingModel(Protocol):
    """Is a model that may have such layers."""

    @property
    def rank_head(self) -> RankLayers | None:
        """Return them; None: the checkpoint has none."""
        ...

"""Define what the runner asks of a model, however its layers are computed."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paged_sdk.config.pooling import Pooling
from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.kernels.step import StepContext

__all__ = ["CausalModel", "RankingModel"]


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


@runtime_checkable
class RankingModel(Protocol):
    """Says how well texts go together, by the layers that a class has for it."""

    @property
    def ranker_pooling(self) -> Pooling | None:
        """Return which vector of a text it makes a number of; None: it makes none."""
        ...

    @property
    def tells_parts(self) -> bool:
        """Say whether it is told which of two texts a token is of."""
        ...

    def ranks(self, vectors: Tensor) -> Tensor:
        """Make one number of each vector: the larger, the better.

        :param vectors: pooled hidden states, float32 ``[num_texts, hidden_size]``
        :returns: ``[num_texts, 1]`` float32
        """
        ...

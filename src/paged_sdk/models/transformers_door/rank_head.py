"""Compute a text's score by the layers that a class of transformers has after an encoder."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paged_sdk.config.pooling import Pooling
from paged_sdk.models.transformers_door.modules import Body

__all__ = ["ClassRankHead"]


class ClassRankHead:
    """Runs a ``ForSequenceClassification`` class on hidden states; implements
    :class:`~paged_sdk.models.causal_model.RankLayers`.

    :param ranker: the class, which contains the body
    :param dtype: dtype of hidden states
    :ivar pooling: how the class pools a text's hidden states
    :ivar takes_token_types: whether the class takes token type ids, which tell a pair's first text from the second
    """

    def __init__(self, ranker: PreTrainedModel, body: Body, dtype: torch.dtype) -> None:
        self._ranker: Any = ranker
        self._body = body
        self._dtype = dtype
        is_mean = getattr(ranker.config, "classifier_pooling", None) == "mean"
        self.pooling: Pooling = "mean" if is_mean else "cls"
        self.takes_token_types: bool = (
            "token_type_ids" in inspect.signature(body.layers.forward).parameters
            and getattr(ranker.config, "type_vocab_size", 0) > 1
        )

    def ranks(self, vectors: Tensor) -> Tensor:
        """Compute the score of each vector; see :meth:`~paged_sdk.models.causal_model.RankLayers.ranks`."""
        return self.ranks_of_states(vectors[:, None])

    def ranks_of_states(self, hidden: Tensor) -> Tensor:
        """Compute the score of each text from its tokens' hidden states, ``[num_texts, num_tokens, hidden_size]``.

        :returns: ``[num_texts, 1]`` float32
        """
        nothing = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        self._body.give(hidden.to(self._dtype))
        try:
            ranks: Tensor = self._ranker(input_ids=nothing, attention_mask=torch.ones_like(nothing)).logits
        finally:
            self._body.give(None)
        return ranks.float()

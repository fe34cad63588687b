"""Compute a text's score by the layers that a class of transformers has after an encoder."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
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

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the layers outside of the body, and of its pooler, by their names in the checkpoint."""
        return {name: parameter.data for name, (_, parameter) in self._parameters().items()}

    def _parameters(self) -> dict[str, tuple[str, nn.Parameter]]:
        """Return each parameter with its name within the class, in which the body is wrapped."""
        body = next(name for name, module in self._ranker.named_modules() if module is self._body)
        named = {name: (name, each) for name, each in self._ranker.named_parameters()}
        inside = f"{body}.layers."
        return {
            name.replace(inside, f"{body}."): own
            for name, own in named.items()
            if not name.startswith(inside) or name.startswith(f"{inside}pooler.")
        }

    def ranks(self, vectors: Tensor, replaced: Mapping[str, Tensor] | None = None) -> Tensor:
        """Compute the score of each vector; see :meth:`~paged_sdk.models.causal_model.RankLayers.ranks`."""
        return self.ranks_of_states(vectors[:, None], replaced)

    def ranks_of_states(self, hidden: Tensor, replaced: Mapping[str, Tensor] | None = None) -> Tensor:
        """Compute the score of each text from its tokens' hidden states, ``[num_texts, num_tokens, hidden_size]``.

        :param replaced: tensors to use instead of some of :attr:`tensors`
        :returns: ``[num_texts, 1]`` float32
        """
        nothing = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        given = {"input_ids": nothing, "attention_mask": torch.ones_like(nothing)}
        names = self._parameters() if replaced else {}
        own = {names[name][0]: tensor for name, tensor in (replaced or {}).items()}
        self._body.give(hidden.to(self._dtype))
        try:
            ranks: Tensor = functional_call(self._ranker, own, (), given).logits
        finally:
            self._body.give(None)
        return ranks.float()

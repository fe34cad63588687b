"""Holds the hidden states that a step has computed."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.sampling.candidates import select_rows

__all__ = ["StepStates"]


@frozen(eq=False, kw_only=True)
class StepStates:
    """Holds the hidden states of a step's tokens, and computes logits from them, adapters included.

    :ivar hidden: ``[num_tokens, hidden_size]``
    :ivar first_tokens: the index of each row's first token
    :ivar adapted: the adapters of the tokens; None: no token has one
    """

    model: CausalModel
    hidden: Tensor
    first_tokens: Sequence[int]
    adapted: AdaptedRows | None = None

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Compute the logits of some tokens, float32 ``[len(tokens), vocab_size]``.

        :param tokens: their indices, ascending
        """
        return self.model.logits(*self.inputs_of_logits(tokens))

    def inputs_of_logits(self, tokens: Sequence[int]) -> tuple[Tensor, AdaptedRows | None]:
        """Return the hidden states of some tokens and the adapters that change their logits, as a model takes them.

        :param tokens: their indices, ascending
        """
        own = None if self.adapted is None else self.adapted.of_logits(tokens)
        return select_rows(self.hidden, tokens), own

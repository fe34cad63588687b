"""Holds what a layer for multi-token prediction knows of one sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.runner.drafted_text import DraftedText
from paged_sdk.runner.first_pause import FirstPause
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.speculative.acceptance import Acceptance

__all__ = ["MtpState"]


class MtpState(DraftedText):
    """Holds what the layer knows of one sequence.

    :ivar kept: the model's hidden states, normed, of the tokens before ``end`` that the layer has not computed yet,
        because the token after the last of them is not known, ``[n, hidden_size]``
    :ivar end: number of the sequence's tokens that the model has computed, drafts included
    """

    __slots__ = ("end", "kept")

    def __init__(self, sequence: Sequence, acceptance: Acceptance, first_pause: FirstPause, kept: Tensor) -> None:
        super().__init__(sequence, acceptance, first_pause)
        self.end: int = 0
        self.kept: Tensor = kept

    @property
    def first(self) -> int:
        """Return the position of the first token that the layer has not computed."""
        return self.end - len(self.kept)

    def begin_at(self, start: int) -> None:
        """Note that the model's next tokens are those from ``start`` on: drafts that were computed may be wrong, or the
        sequence may have lost its KV.
        """
        num_left = start - self.first
        self.kept = self.kept[: num_left if 0 <= num_left <= len(self.kept) else 0]
        self.end = start

    def keep(self, states: Tensor) -> None:
        """Keep the hidden states of the model's next tokens, which may be a view of a whole step's."""
        self.kept = torch.cat((self.kept, states)) if len(self.kept) else states.clone()
        self.end += len(states)

    @property
    def num_ready(self) -> int:
        """Return how many of the kept states' tokens have a token after them that is known."""
        return min(len(self.kept), len(self.sequence.token_ids) - 1 - self.first)

"""Holds what an assistant knows of one sequence."""

from __future__ import annotations

from torch import Tensor

from paged_sdk.runner.drafted_text import DraftedText
from paged_sdk.runner.first_pause import FirstPause
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.speculative.acceptance import Acceptance

__all__ = ["AssistantState"]


class AssistantState(DraftedText):
    """Holds what an assistant knows of one sequence.

    :ivar states: the target's hidden states, normed, at the last tokens before ``end``, ``[n, hidden_size]``
    :ivar end: number of the sequence's tokens that the target has computed, drafts included
    """

    __slots__ = ("end", "states")

    def __init__(self, sequence: Sequence, acceptance: Acceptance, first_pause: FirstPause) -> None:
        super().__init__(sequence, acceptance, first_pause)
        self.end: int = 0
        self.states: Tensor | None = None

    @property
    def last_state(self) -> Tensor | None:
        """Return the hidden state at the token before the last one, ``[1, hidden_size]``; None: it is not here."""
        if self.states is None:
            return None
        place = len(self.states) - (self.end - (len(self.sequence.token_ids) - 1)) - 1
        return self.states[place : place + 1] if 0 <= place < len(self.states) else None

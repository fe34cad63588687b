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

    :ivar hidden: the target's hidden states at the last tokens before ``end``, ``[n, hidden_size]``, as its ``normed``
        takes them; None: none is known
    :ivar end: number of the sequence's tokens that the target has computed, drafts included
    """

    __slots__ = ("end", "hidden")

    def __init__(self, sequence: Sequence, acceptance: Acceptance, first_pause: FirstPause) -> None:
        super().__init__(sequence, acceptance, first_pause)
        self.end: int = 0
        self.hidden: Tensor | None = None

    @property
    def last_hidden(self) -> Tensor | None:
        """Return the hidden state at the token before the last one, ``[1, hidden_size]``; None: it is not here."""
        if self.hidden is None:
            return None
        place = len(self.sequence.token_ids) - 2 - (self.end - len(self.hidden))
        return self.hidden[place : place + 1] if 0 <= place < len(self.hidden) else None

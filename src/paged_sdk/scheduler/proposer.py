"""Who guesses the tokens that follow a text, for the model to verify several of them in one step."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Texts
from typing import Protocol

from paged_sdk.scheduler.sequence import Sequence

__all__ = ["Proposer"]


class Proposer(Protocol):
    """Proposes drafts (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023).

    The engine asks it before each step. Whatever it says, texts are those that the model would write without it: a
    draft counts only where it is the token that is sampled there.
    """

    def propose(self, sequences: Texts[Sequence]) -> list[list[int]]:
        """Guess what follows.

        :param sequences: texts that only generate, all of whose tokens are known; not to be changed
        :returns: for each text any number of tokens, also none. The scheduler takes as many of the first as budget,
            memory and the text's length leave room for
        """
        ...

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop what is kept of sequences that have ended; unknown ones are fine."""
        ...

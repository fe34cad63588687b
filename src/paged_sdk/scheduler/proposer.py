"""Defines the interface of draft proposers; the model verifies several draft tokens in one step."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Texts
from typing import Protocol

from paged_sdk.scheduler.sequence import Sequence

__all__ = ["Proposer"]


class Proposer(Protocol):
    """Proposes drafts (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023).

    The engine asks it before each step. Drafts never change the output: a draft is accepted only where it equals the
    token that the model samples there.
    """

    def propose(self, sequences: Texts[Sequence]) -> list[list[int]]:
        """Propose the tokens that follow each sequence.

        :param sequences: sequences that only decode, all of whose tokens are known; must not be changed
        :returns: for each sequence any number of tokens, possibly none. The scheduler uses the first of them, as many
            as budget, KV memory and the maximum length allow
        """
        ...

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of sequences that have ended; unknown ids are allowed."""
        ...

    def reset(self) -> None:
        """Forget everything learned from sequences that have ended."""
        ...

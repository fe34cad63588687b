"""Asks several proposers for drafts, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Texts

from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.scheduler.sequence import Sequence

__all__ = ["SeveralProposers"]


class SeveralProposers:
    """Asks each proposer for drafts of the sequences for which earlier proposers have none.

    :param proposers: the cheapest first
    """

    def __init__(self, proposers: Texts[Proposer]) -> None:
        self._proposers = proposers

    def propose(self, sequences: Texts[Sequence]) -> list[list[int]]:
        """Propose the tokens that follow each sequence."""
        found: list[list[int]] = [[] for _ in sequences]
        for proposer in self._proposers:
            left = [place for place, drafts in enumerate(found) if not drafts]
            if not left:
                break
            for place, drafts in zip(left, proposer.propose([sequences[place] for place in left]), strict=True):
                found[place] = drafts
        return found

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of sequences that have ended."""
        ended = list(seq_ids)
        for proposer in self._proposers:
            proposer.forget(ended)

    def reset(self) -> None:
        """Forget texts that have ended."""
        for proposer in self._proposers:
            proposer.reset()

"""Keeps drafts to the tokens that the host may choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Texts

from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.scheduler.request import Request
from paged_sdk.scheduler.sequence import Sequence

__all__ = ["HostDrafts"]


class HostDrafts:
    """Proposes what another proposer does, as far as a text stays the same if the host chooses its tokens.

    The host samples rows with drafts, where a device may choose another token from the same distribution. Which of
    them chooses must not depend on the drafts.

    :param proposer: makes the drafts
    :param num_on_host: says how many tokens of a request's texts, from the first on, the host may choose
    """

    def __init__(self, proposer: Proposer, num_on_host: Callable[[Request], int]) -> None:
        self._proposer = proposer
        self._num_on_host = num_on_host

    def propose(self, sequences: Texts[Sequence]) -> list[list[int]]:
        """Propose the tokens that follow each sequence."""
        # The token after the last draft is chosen in the same step.
        most = [self._num_on_host(each.request) - each.num_output_tokens - 1 for each in sequences]
        asked = [place for place, number in enumerate(most) if number > 0]
        found: list[list[int]] = [[] for _ in sequences]
        if asked:
            for place, drafts in zip(asked, self._proposer.propose([sequences[each] for each in asked]), strict=True):
                found[place] = drafts[: most[place]]
        return found

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of sequences that have ended."""
        self._proposer.forget(seq_ids)

    def reset(self) -> None:
        """Forget what is kept of texts that have ended."""
        self._proposer.reset()

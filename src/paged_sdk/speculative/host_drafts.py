"""Limits drafts to tokens that are sampled on the host anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Texts

from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.scheduler.request import Request
from paged_sdk.scheduler.sequence import Sequence

__all__ = ["HostDrafts"]


class HostDrafts:
    """Passes on another proposer's drafts, as far as drafts do not change the text.

    Rows with drafts are sampled on the host, where the device may draw another token from the same distribution. So
    drafts must not decide which of the two samples a token.

    :param proposer: makes the drafts
    :param num_on_host: returns how many of a request's output tokens, from the first, the host may sample
    """

    def __init__(self, proposer: Proposer, num_on_host: Callable[[Request], int]) -> None:
        self._proposer = proposer
        self._num_on_host = num_on_host

    def propose(self, sequences: Texts[Sequence]) -> list[list[int]]:
        """Propose the tokens that follow each sequence."""
        # The token after the last draft is sampled in the same step.
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
        """Forget texts that have ended."""
        self._proposer.reset()

"""Counts how many tokens of a caller's prediction occur in the output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paged_sdk.speculative.acceptance import Acceptance
from paged_sdk.speculative.follower import Follower
from paged_sdk.speculative.token_index import LENGTHS, TokenIndex, context_keys

__all__ = ["PredictionCount", "follow_prediction"]


def follow_prediction(token_ids: Sequence[int], acceptance: Acceptance) -> Follower:
    """Return a follower of a text along a prediction of it; both likely begin alike."""
    follower = Follower(TokenIndex(list(token_ids)), acceptance, is_own=False)
    follower.begin_at(0)
    return follower


class PredictionCount:
    """Counts the output tokens that a prediction had right, following the output along the prediction.

    The count depends on the tokens alone, not on which of them were verified as drafts.

    :param token_ids: the prediction
    :ivar num_accepted: number of output tokens that were the prediction's next token
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.num_accepted: int = 0
        self._follower = follow_prediction(token_ids, Acceptance())
        self._used: set[int] = set()
        self._num_tokens = len(token_ids)
        self._tail: list[int] = []

    @property
    def num_rejected(self) -> int:
        """Return the number of the prediction's tokens that no output token matched."""
        return self._num_tokens - len(self._used)

    def note(self, token_ids: Iterable[int]) -> None:
        """Record the next output tokens."""
        follower, source = self._follower, self._follower.index.token_ids
        for token in token_ids:
            place = follower.place
            if 0 <= place < len(source) and source[place] == token:
                self.num_accepted += 1
                self._used.add(place)
            follower.advance(token)
            self._tail = [*self._tail[1 - LENGTHS[0] :], token]
            if not follower.is_sure:
                follower.seek(self._tail, context_keys(self._tail))

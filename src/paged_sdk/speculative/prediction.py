"""Counts how much of a prediction comes to be in a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paged_sdk.speculative.acceptance import Acceptance
from paged_sdk.speculative.follower import Follower
from paged_sdk.speculative.token_index import LENGTHS, TokenIndex, context_keys

__all__ = ["PredictionCount", "follow_prediction"]


def follow_prediction(token_ids: Sequence[int], acceptance: Acceptance) -> Follower:
    """Return who follows a text along a prediction of it, which likely begins as the text does."""
    follower = Follower(TokenIndex(list(token_ids)), acceptance, is_own=False)
    follower.begin_at(0)
    return follower


class PredictionCount:
    """Counts the tokens of a text that its prediction had at their place, as the text is followed along it.

    It goes by the tokens alone: the count does not depend on which of them steps have verified as drafts.

    :param token_ids: the prediction
    :ivar num_accepted: how many tokens of the text were the prediction's next
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.num_accepted: int = 0
        self._follower = follow_prediction(token_ids, Acceptance())
        self._used: set[int] = set()
        self._num_tokens = len(token_ids)
        self._tail: list[int] = []

    @property
    def num_rejected(self) -> int:
        """Return how many tokens of the prediction are not in the text at their place."""
        return self._num_tokens - len(self._used)

    def note(self, token_ids: Iterable[int]) -> None:
        """Take in the text's next tokens."""
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

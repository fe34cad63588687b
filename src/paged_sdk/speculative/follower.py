"""Follows a text along a source text, to guess its next tokens."""

from __future__ import annotations

from typing import Final

from paged_sdk.speculative.acceptance import FAR, NEAR, START, Acceptance, evidence
from paged_sdk.speculative.token_index import LENGTHS, TokenIndex

__all__ = ["Follower"]

NEAR_SPAN: Final = 48
"""How many tokens beyond a departure are searched for the text's return to its source."""
LONGEST: Final = 16
"""Number of agreeing tokens from which no better place is looked for."""
SETTLED: Final = 4
"""Number of agreeing tokens after which a text is back on its source."""
LEAST_CHANCE: Final = 0.05
"""Least probability of a draft: one more token lengthens a step by at least this fraction."""
VOTED: Final = 4
"""Number of next tokens on which places with the same context vote; of those that agree, the last one is taken."""


class Follower:
    """Follows one text, token by token, along a source: the text's own earlier part, a prediction, or other texts.

    While tokens agree, the guess is the source's next token. A token that differs is a departure from the source, such
    as an edit. The token is then assumed to replace one of the source, unless a better place is found: shortly after
    the departure, where an edited text usually returns to its source, or anywhere with the same preceding tokens.

    :param acceptance: estimates how likely guesses are right
    :param is_own: whether the source is the text itself, which grows
    :ivar index: index of the source
    :ivar place: the source's token that is guessed next; -1: there is no guess
    """

    __slots__ = ("_acceptance", "_departure", "_is_own", "_origin", "_run", "index", "place")

    def __init__(self, index: TokenIndex, acceptance: Acceptance, *, is_own: bool) -> None:
        self.index: TokenIndex = index
        self.place: int = -1
        self._acceptance = acceptance
        self._is_own = is_own
        self._run = 0
        self._origin = FAR
        self._departure = -1

    def begin_at(self, place: int) -> None:
        """Follow the source from the place where the text likely begins."""
        self.place, self._run, self._origin = place, 0, START

    @property
    def chance(self) -> float:
        """Return the probability that the first guess is right; 0 without a guess."""
        if not 0 <= self.place < len(self.index.token_ids):
            return 0.0
        return self._acceptance.rates[evidence(self._origin, self._run)]

    @property
    def is_sure(self) -> bool:
        """Return whether enough tokens agree to look for no better place."""
        return self._run >= LONGEST and self.place >= 0

    def advance(self, token: int) -> None:
        """Advance by the text's next token."""
        place, source = self.place, self.index.token_ids
        if not 0 <= place < len(source):
            self.place = -1
            return
        right = source[place] == token
        self._acceptance.note(evidence(self._origin, self._run), right=right)
        self.place = place + 1
        if right:
            self._run += 1
        else:
            # A near place that is left within a few tokens was wrong: the earlier departure stays in force.
            if self._run >= SETTLED or self._origin != NEAR or self._departure < 0:
                self._departure = place
            self._run, self._origin = 0, NEAR

    def seek(self, tail: list[int], keys: tuple[int, int, int]) -> None:
        """Look for a better place than the present one.

        :param tail: the last tokens of the text
        :param keys: their :func:`~paged_sdk.speculative.token_index.context_keys`
        """
        rates = self._acceptance.rates
        present = rates[evidence(self._origin, self._run)] if self.place >= 0 else 0.0
        found = self._near(tail) if self._run == 0 and self._departure >= 0 else None
        if found is not None:
            place, run = found
            rate = rates[evidence(NEAR, run)]
            if rate >= present:
                self.place, self._run, self._origin, present = place, run, NEAR, rate
        for level, length in enumerate(LENGTHS):
            if length <= self._run:
                return
            places = self.index.places(level, keys[level])
            if places:
                self._go_far(places, length, present)
                return

    def guesses(self, most: int) -> list[int]:
        """Return the source's next tokens, at most ``most``.

        If the source is the text itself and ends before that, the tokens are repeated, as a loop would continue.
        """
        if self.place < 0:
            return []
        found = self.index.token_ids[self.place : self.place + most]
        if self._is_own and 0 < len(found) < most:
            found = (found * (most // len(found) + 1))[:most]
        return found

    def chances(self, most: int) -> list[float]:
        """Return the probabilities that the first guess is right, that the first two are, ..., down to the least."""
        rates, origin, run = self._acceptance.rates, self._origin, self._run
        num_left = len(self.index.token_ids) - self.place
        if self.place < 0 or num_left <= 0:
            return []
        chance, found = 1.0, []
        for ahead in range(run, run + (most if self._is_own else min(most, num_left))):
            chance *= rates[evidence(origin, ahead)]
            if chance < LEAST_CHANCE:
                break
            found.append(chance)
        return found

    def _near(self, tail: list[int]) -> tuple[int, int] | None:
        """Look for the text's last token shortly after the departure.

        :returns: the place after it with the most agreeing tokens, of equals the nearest, and their number
        """
        source, start = self.index.token_ids, self._departure
        end, token = min(start + NEAR_SPAN, len(source) - 1), tail[-1]
        best: tuple[int, int] | None = None
        while True:
            try:
                at = source.index(token, start, end)
            except ValueError:
                return best
            run = _agreeing(source, at + 1, tail, SETTLED)
            if best is None or run > best[1]:
                best = at + 1, run
                if run == SETTLED:
                    return best
            start = at + 1

    def _go_far(self, places: list[int], length: int, present: float) -> None:
        """Move to the likeliest of some places if its probability exceeds ``present``.

        :param length: number of agreeing tokens before each place
        """
        place, share = _likeliest(self.index.token_ids, places)
        if place == self.place:
            self._run = max(self._run, length)
        elif min(self._acceptance.rates[evidence(FAR, length)], share) > present:
            self.place, self._run, self._origin, self._departure = place, length, FAR, -1


def _agreeing(source: list[int], place: int, tail: list[int], most: int) -> int:
    """Return how many tokens before a place of the source agree with the text's last tokens, at most ``most``."""
    most = min(most, place, len(tail))
    for count in range(most):
        if source[place - 1 - count] != tail[-1 - count]:
            return count
    return most


def _likeliest(source: list[int], places: list[int]) -> tuple[int, float]:
    """Let places vote on the next tokens.

    :param places: the last place first
    :returns: the last place whose next tokens won each vote, and the first vote's share, smoothed by one vote
    """
    if len(places) == 1:
        return places[0], 1.0
    share, left = 1.0, places
    for ahead in range(VOTED):
        votes: dict[int, int] = {}
        for place in left:
            if place + ahead < len(source):
                token = source[place + ahead]
                votes[token] = votes.get(token, 0) + 1
        if not votes:
            break
        winner = max(votes, key=votes.__getitem__)
        if not ahead:
            share = (votes[winner] + 1) / (len(left) + 1)
        left = [place for place in left if place + ahead < len(source) and source[place + ahead] == winner]
        if len(left) == 1:
            break
    return left[0], share

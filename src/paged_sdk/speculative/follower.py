"""Follows a text along another one that says what may come next."""

from __future__ import annotations

from typing import Final

from paged_sdk.speculative.acceptance import FAR, NEAR, START, Acceptance, evidence
from paged_sdk.speculative.token_index import LENGTHS, TokenIndex

__all__ = ["Follower"]

NEAR_SPAN: Final = 48
"""After a departure the text is looked for so many tokens beyond the place where it departed."""
LONGEST: Final = 16
"""So many agreeing tokens are counted when a place is found; and from there on no better place is looked for."""
SETTLED: Final = 4
"""After so many agreeing tokens a text is back on its source."""
LEAST_CHANCE: Final = 0.05
"""Less likely guesses pay nowhere: one more token takes at least so much of a step."""
VOTED: Final = 4
"""So many next tokens are voted on by the places that have the same context, then the last written of those goes on."""


class Follower:
    """Follows one text, token by token, along a source: earlier parts of the text itself, a prediction, other texts.

    While the tokens agree, the next is guessed to be the source's next. Where they do not, the source is left, as by
    an edit: then one token was replaced and the source goes on after it, unless a better place is found: shortly after
    the departure, for that is where an edited text comes back; or wherever the source has the same last tokens.

    :param acceptance: how likely guesses are right
    :param is_own: whether the source is the text itself, which grows
    :ivar index: the source
    :ivar place: the place in the source that is guessed to be next; -1: none is
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
        """Follow the source from a place on that is likely the text's beginning."""
        self.place, self._run, self._origin = place, 0, START

    @property
    def chance(self) -> float:
        """Return how likely the first guess is right; 0 if there is none."""
        if not 0 <= self.place < len(self.index.token_ids):
            return 0.0
        return self._acceptance.rates[evidence(self._origin, self._run)]

    @property
    def is_sure(self) -> bool:
        """Say whether so many tokens agree that no better place is to be looked for."""
        return self._run >= LONGEST and self.place >= 0

    def advance(self, token: int) -> None:
        """Take in the text's next token."""
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
            # A place that was found near and left soon was the wrong one: the departure is still where it was.
            if self._run >= SETTLED or self._origin != NEAR or self._departure < 0:
                self._departure = place
            self._run, self._origin = 0, NEAR

    def seek(self, tail: list[int], keys: tuple[int, int, int]) -> None:
        """Look for a better place than the present one.

        :param tail: the last tokens of the text
        :param keys: the keys of its contexts
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
        """Return the tokens that the source has next.

        A source that is the text itself goes on with what it has just guessed: what repeats itself goes on so.
        """
        if self.place < 0:
            return []
        found = self.index.token_ids[self.place : self.place + most]
        if self._is_own and 0 < len(found) < most:
            found = (found * (most // len(found) + 1))[:most]
        return found

    def chances(self, most: int) -> list[float]:
        """Return how likely the first guess is right, the first two are, and so on, while that is likely at all."""
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
        """Look for the last token shortly after the departure.

        :returns: the nearest place with the most agreeing tokens before it, and their number
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
        """Go to the likeliest of some places if it is likelier than the present one.

        :param length: how many tokens before each agree
        """
        place, share = _likeliest(self.index.token_ids, places)
        if place == self.place:
            self._run = max(self._run, length)
        elif min(self._acceptance.rates[evidence(FAR, length)], share) > present:
            self.place, self._run, self._origin, self._departure = place, length, FAR, -1


def _agreeing(source: list[int], place: int, tail: list[int], most: int) -> int:
    """Return how many tokens before a place of the source agree with the text's last ones."""
    most = min(most, place, len(tail))
    for count in range(most):
        if source[place - 1 - count] != tail[-1 - count]:
            return count
    return most


def _likeliest(source: list[int], places: list[int]) -> tuple[int, float]:
    """Let places vote on what comes next.

    :param places: the last one first
    :returns: the last of those whose next tokens have the most votes, and the share of votes for the first of these
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

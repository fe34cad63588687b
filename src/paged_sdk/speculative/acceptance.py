"""Estimates how likely a guess is right, from how often such guesses were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["FAR", "NEAR", "START", "Acceptance", "TextAcceptance", "evidence"]

NEAR: Final = 0
"""A guess shortly after the place where the text departed from what it followed."""
FAR: Final = 1
"""A guess at a place that merely has the same last tokens before it."""
START: Final = 13
"""The kind of evidence at the beginning of a text that somebody has predicted."""

# How many of the last tokens agree with what precedes the guess: 0, 1, 2-3, 4-7 near; 2-3, 4-7 elsewhere; from 8 on it
# makes no difference how the place was found.
_NEAR: Final = (0, 1, 2, 2, 3, 3, 3, 3)
_FAR: Final = (4, 4, 4, 4, 5, 5, 5, 5)
_LONG: Final = (6,) * 8 + (7,) * 16 + (8,) * 32
_BY_RUN: Final = (_NEAR + _LONG, _FAR + _LONG)
_PRIOR: Final = (0.1, 0.25, 0.5, 0.7, 0.5, 0.65, 0.82, 0.88, 0.93)
_START: Final = 9
_PRIOR_START: Final = 0.6
_PRIOR_WEIGHT: Final = 20.0
_MEMORY: Final = 0.995
"""Of all texts of a model, guesses count half after 140 of their kind; of one text after 14."""
_OWN_MEMORY: Final = 0.95
_OWN_WEIGHT: Final = 6.0
"""So many guesses of a text itself count as much as what is known of other texts."""
_TEXT_MEMORY: Final = 0.98
"""How much a text repeats is known after few guesses, and forgotten slowly: of one text they count half after 34."""
_DOUBT: Final = 2.0
"""A text begins as if so many guesses had been wrong beyond those that were to be expected. Without it, the first text
of prose after 23 edits of code took half a percent longer, and edits were no faster: in both, the first tokens tell."""


def evidence(origin: int, run: int) -> int:
    """Return the kind of evidence for a guess.

    :param origin: how its place was found: :data:`NEAR`, :data:`FAR` or :data:`START`
    :param run: how many tokens before it agree
    """
    if origin == START:
        return _START if run == 0 else _BY_RUN[NEAR][run] if run < len(_BY_RUN[NEAR]) else _LONG[-1]
    kinds = _BY_RUN[origin]
    return kinds[run] if run < len(kinds) else _LONG[-1]


class Acceptance:
    """Estimates, by the kind of evidence, how likely the next token is the guessed one.

    Every guess counts, also those that no step verified: the text itself shows later what they were worth. So a text
    for which drafts do not pay need not try any to learn when they would.

    :param shared: what is known of all texts; None makes an estimate of all texts
    :param priors: what such an estimate begins with, for each kind of evidence
    :ivar rates: the estimate for each kind of evidence
    """

    __slots__ = ("_hits", "_memory", "_shared", "_trials", "rates")

    def __init__(self, shared: Acceptance | None = None, *, priors: Sequence[float] = (*_PRIOR, _PRIOR_START)) -> None:
        self._shared = shared
        if shared is None:
            self._memory = _MEMORY
            self._trials = [_PRIOR_WEIGHT] * len(priors)
            self._hits = [_PRIOR_WEIGHT * rate for rate in priors]
        else:
            self._memory = _OWN_MEMORY
            self._trials = [0.0] * len(shared.rates)
            self._hits = [0.0] * len(shared.rates)
        self.rates: list[float] = list(priors if shared is None else shared.rates)

    def note(self, kind: int, *, right: bool) -> None:
        """Take in whether a guess was right."""
        shared, memory = self._shared, self._memory
        trials = self._trials[kind] = self._trials[kind] * memory + 1.0
        hits = self._hits[kind] = self._hits[kind] * memory + right
        if shared is None:
            self.rates[kind] = hits / trials
        else:
            shared.note(kind, right=right)
            self.rates[kind] = (hits + _OWN_WEIGHT * shared.rates[kind]) / (trials + _OWN_WEIGHT)


class TextAcceptance(Acceptance):
    """Estimates the same for one text, by how much it repeats at all.

    Texts differ less in which evidence is better than in what any of it is worth: eight tokens of prose that were
    written before tell less than two of code that is edited. So one factor of a text's own goes with all that is known
    of other texts, by how many guesses were right and by how many were to be expected, whatever their kind. It
    multiplies odds. A text of prose that follows texts of code is known as such after a few tokens, not after some of
    each kind.

    :param shared: what is known of all texts
    """

    __slots__ = ("_expected_right", "_expected_wrong", "_right", "_wrong")

    def __init__(self, shared: Acceptance) -> None:
        super().__init__(shared)
        self._right = self._expected_right = self._expected_wrong = 1.0
        self._wrong = 1.0 + _DOUBT
        self._estimate(shared.rates)

    def note(self, kind: int, *, right: bool) -> None:
        """Take in whether a guess was right."""
        shared = self._shared
        assert shared is not None, "a text's estimate has one of all texts"
        expected = shared.rates[kind]
        super().note(kind, right=right)
        # Each begins at one, to which it returns: a single guess is no certainty.
        self._right += right - (1 - _TEXT_MEMORY) * (self._right - 1)
        self._wrong += (not right) - (1 - _TEXT_MEMORY) * (self._wrong - 1)
        self._expected_right += expected - (1 - _TEXT_MEMORY) * (self._expected_right - 1)
        self._expected_wrong += 1 - expected - (1 - _TEXT_MEMORY) * (self._expected_wrong - 1)
        self._estimate(shared.rates)

    def _estimate(self, shared: Sequence[float]) -> None:
        factor = self._right * self._expected_wrong / (self._expected_right * self._wrong)
        self.rates[:] = [
            (hits + _OWN_WEIGHT * factor * rate / (1 + (factor - 1) * rate)) / (trials + _OWN_WEIGHT)
            for rate, trials, hits in zip(shared, self._trials, self._hits, strict=True)
        ]

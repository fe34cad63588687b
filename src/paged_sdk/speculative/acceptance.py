"""Estimates acceptance rates of guessed tokens, by kind of evidence, from the outcomes of earlier guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["FAR", "NEAR", "START", "Acceptance", "TextAcceptance", "evidence"]

NEAR: Final = 0
"""Origin of a guess: found shortly after the place where the text departed from its source."""
FAR: Final = 1
"""Origin of a guess: found anywhere in the source, by equal preceding tokens."""
START: Final = 13
"""Origin of a guess: the beginning of a text for which the caller gave a prediction."""

# Kinds of evidence, by number of agreeing tokens before the guess: kinds 0-3 for 0, 1, 2-3, 4-7 near; kinds 4-5 for up
# to 3 and 4-7 far; from 8 tokens on, kinds 6-8 whatever the origin.
_NEAR: Final = (0, 1, 2, 2, 3, 3, 3, 3)
_FAR: Final = (4, 4, 4, 4, 5, 5, 5, 5)
_LONG: Final = (6,) * 8 + (7,) * 16 + (8,) * 32
_BY_RUN: Final = (_NEAR + _LONG, _FAR + _LONG)
_PRIOR: Final = (0.1, 0.25, 0.5, 0.7, 0.5, 0.65, 0.82, 0.88, 0.93)
_START: Final = 9
_PRIOR_START: Final = 0.6
_PRIOR_WEIGHT: Final = 20.0
_MEMORY: Final = 0.995
"""Decay per guess of a kind: over all texts, a guess counts half after 140 more; within one text, after 14."""
_OWN_MEMORY: Final = 0.95
_OWN_WEIGHT: Final = 6.0
"""Weight of the estimate over all texts, in guesses of the text itself."""
_TEXT_MEMORY: Final = 0.98
"""Decay per guess of a text's factor, which is known after few guesses and changes slowly: half-life 34 guesses."""
_DOUBT: Final = 2.0
"""Number of unexpected wrong guesses with which a text starts. Without it, the first prose after 23 edits of code took
half a percent longer, and edits were no faster: the first tokens show which of the two a text is."""


def evidence(origin: int, run: int) -> int:
    """Return the kind of evidence for a guess, an index of :attr:`Acceptance.rates`.

    :param origin: how the place was found: :data:`NEAR`, :data:`FAR` or :data:`START`
    :param run: number of agreeing tokens before the guess
    """
    if origin == START:
        return _START if run == 0 else _BY_RUN[NEAR][run] if run < len(_BY_RUN[NEAR]) else _LONG[-1]
    kinds = _BY_RUN[origin]
    return kinds[run] if run < len(kinds) else _LONG[-1]


class Acceptance:
    """Estimates the probability that a guessed token is right, for each kind of evidence.

    Every guess counts, verified as a draft or not, since the text shows later whether it was right. So learning
    continues for texts that get no drafts.

    :param shared: the estimate over all texts, for an estimate of one text; None makes an estimate over all texts
    :param priors: initial rates of an estimate over all texts
    :ivar rates: the estimated probability for each kind of evidence
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
        """Record whether a guess was right."""
        shared, memory = self._shared, self._memory
        trials = self._trials[kind] = self._trials[kind] * memory + 1.0
        hits = self._hits[kind] = self._hits[kind] * memory + right
        if shared is None:
            self.rates[kind] = hits / trials
        else:
            shared.note(kind, right=right)
            self.rates[kind] = (hits + _OWN_WEIGHT * shared.rates[kind]) / (trials + _OWN_WEIGHT)


class TextAcceptance(Acceptance):
    """Estimates the same for one text, with a factor for how repetitive the text is.

    Texts differ more in how repetitive they are than in the ranking of evidence: a repetition of eight tokens of prose
    is a weaker sign than one of two tokens of edited code. So the odds of every kind, estimated over all texts, are
    multiplied by one factor per text: the odds of its right guesses, divided by the expected odds. Prose after code is
    recognized after a few tokens, not after a few guesses of each kind.

    :param shared: the estimate over all texts
    """

    __slots__ = ("_expected_right", "_expected_wrong", "_right", "_wrong")

    def __init__(self, shared: Acceptance) -> None:
        super().__init__(shared)
        self._right = self._expected_right = self._expected_wrong = 1.0
        self._wrong = 1.0 + _DOUBT
        self._estimate(shared.rates)

    def note(self, kind: int, *, right: bool) -> None:
        """Record whether a guess was right."""
        shared = self._shared
        assert shared is not None, "a text's estimate has one of all texts"
        expected = shared.rates[kind]
        super().note(kind, right=right)
        # Each count decays towards its prior of one, so that no single guess makes the odds 0 or infinite.
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

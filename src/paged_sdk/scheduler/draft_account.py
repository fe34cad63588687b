"""Keeps account of what drafts have brought and cost."""

from __future__ import annotations

from typing import Final

from paged_sdk.scheduler.step_times import StepTimes

__all__ = ["DraftAccount"]

START: Final = 1.5
"""Drafts may lose so many steps' time before they have to have gained any: a few attempts."""
MOST: Final = 3.0
"""What was gained is remembered up to so many steps' time: a text that drafts suit lends the next one no more."""
SHARE: Final = 0.01
"""Each step without drafts allows drafts to lose so much of its time later. With what choosing them takes, speculation
costs less than 2 %."""
LATE: Final = 2.0
"""A step that takes this times as long as expected was interrupted: what is beyond is not the drafts' fault."""
REFRESH: Final = 128
"""Of so many steps with drafts one goes without, so that what they are compared with is not long past. It loses what
the drafts gain in one step."""


class DraftAccount:
    """Keeps account of the time that drafts have gained and lost.

    A step with drafts takes longer and gives more tokens. Had these come one by one, they would have taken as many
    steps without drafts, the time of which is known: the difference is gained or lost. While more is lost than
    allowed, texts go on without drafts, whatever is expected of them.

    :param times: how long steps take
    :ivar num_drafted: how many drafts were verified
    :ivar num_accepted: how many of them were right
    """

    def __init__(self, times: StepTimes) -> None:
        self.num_drafted: int = 0
        self.num_accepted: int = 0
        self._times = times
        self._balance = START
        self._seconds = 0.0
        self._seconds_without = 0.0
        self._num_since_plain = 0

    @property
    def allows(self) -> bool:
        """Say whether the next step may have drafts."""
        return self._balance > 0 and self._num_since_plain < REFRESH

    @property
    def speed_up(self) -> float:
        """Return how many times as long the generation of all texts so far would have taken without drafts."""
        return self._seconds_without / self._seconds if self._seconds > 0 else 1.0

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Count drafts of a step whose time says nothing of them."""
        self.num_drafted += num_drafts
        self.num_accepted += num_accepted

    def note(
        self,
        num_texts: int,
        num_drafts: int,
        num_accepted: int,
        seconds: float,
        drafting_seconds: float = 0.0,
        num_forced: int = 0,
    ) -> None:
        """Take in a step without prompts, before its time is noted.

        :param num_texts: how many texts it gave a token
        :param num_drafts: how many drafts it verified
        :param num_accepted: how many of these were right
        :param seconds: how long it took, without making the drafts
        :param drafting_seconds: how long that took
        :param num_forced: how many of the right ones a constraint left no choice in: such a draft is no guess, so that
            the others are judged beside it
        """
        num_guesses, num_right = num_drafts - num_forced, num_accepted - num_forced
        self.count(num_guesses, num_right)
        self._seconds += seconds + drafting_seconds
        if not num_drafts:
            if self._num_since_plain >= REFRESH:
                self._times.forget(num_texts)
            self._seconds_without += seconds
            self._balance = min(self._balance + SHARE, MOST)
            self._num_since_plain = 0
            return
        self._num_since_plain += num_guesses > 0
        plain = self._times.nearest(num_texts)
        if not plain:  # a clock may be too coarse to see a step
            self._seconds_without += seconds
            return
        self._seconds_without += (1 + num_accepted / num_texts) * plain
        if not num_guesses:
            return
        late = LATE * max(self._times.expected(num_texts + num_drafts), plain)
        # No draft takes a smaller model as long as a step: what is beyond went into reading a text for the first time.
        spent = min(seconds, late) + min(drafting_seconds, num_guesses * plain)
        without = min(max(self._times.expected(num_texts + num_forced), plain), spent) if num_forced else plain
        self._balance = min(self._balance + num_right / num_texts + (without - spent) / plain, MOST)

"""Notice when a process has hung."""

from __future__ import annotations

from typing import Final

from paged_sdk.config.hang_limits import HangLimits

__all__ = ["Pulse"]

ROUNDS: Final = 10
"""So often a process is asked within the shorter limit, so that it is noticed at most a tenth later."""


class Pulse:
    """Judges by what a process says, and does not say, whether it has hung.

    Time is counted in rounds, in each of which the process is asked once, and not read from a clock. A round that took
    long because this process was stopped itself, or the whole machine, counts as one: nobody else hung meanwhile.

    One thread may call :meth:`note` and :meth:`note_step` while another calls :meth:`next_round`.

    :ivar round_seconds: how long a round is; None: there is no limit, so that nothing needs to be asked
    """

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        given = [each for each in (limits.silent_seconds, limits.step_seconds) if each is not None]
        self.round_seconds: float | None = min(given) / ROUNDS if given else None
        self._has_spoken = True
        self._said_step: int | None = None
        self._step: int | None = None
        self._num_silent = 0
        self._num_same = 0

    def note(self) -> None:
        """Take it that the process has said something, whatever that is."""
        self._has_spoken = True

    def note_step(self, number: int | None) -> None:
        """Take it that the process has said which step is running.

        :param number: other steps have others; None: none is running
        """
        self._said_step = number

    def next_round(self) -> str | None:
        """Begin a round.

        :returns: None, or that it has hung and why, to be said of it
        """
        self._num_silent = 0 if self._has_spoken else self._num_silent + 1
        self._has_spoken = False
        step = self._said_step
        self._num_same = self._num_same + 1 if step is not None and step == self._step else 0
        self._step = step
        limits = self._limits
        if self._are_over(self._num_silent, limits.silent_seconds):
            return f"it has hung: nothing was heard of it for {limits.silent_seconds:g} s"
        if self._are_over(self._num_same, limits.step_seconds):
            return f"it has hung: a step of its engine has taken {limits.step_seconds:g} s"
        return None

    def _are_over(self, rounds: int, limit: float | None) -> bool:
        """Tell whether so many rounds are as long as a limit."""
        return limit is not None and self.round_seconds is not None and rounds >= round(limit / self.round_seconds)

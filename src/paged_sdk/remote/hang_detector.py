"""Detect that a process has hung."""

from __future__ import annotations

from typing import Final

from paged_sdk.config.hang_limits import HangLimits

__all__ = ["HangDetector"]

ROUNDS: Final = 10
"""The number of pings within the shorter limit, so that a hang is detected at most a tenth of the limit late."""


class HangDetector:
    """Decides from the messages of a process, or their absence, whether it has hung.

    Time is counted in rounds of one ping each, not by a clock. If this process or the whole machine is suspended, the
    round takes long but counts as one, since that does not mean that the other process hangs.

    One thread may call :meth:`note` and :meth:`note_step` while another calls :meth:`next_round`.

    :ivar round_seconds: the duration of a round; None: there is no limit, and no need to ping
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
        """Record that the process has sent a message of any kind."""
        self._has_spoken = True

    def note_step(self, number: int | None) -> None:
        """Record which step the process is running.

        :param number: a unique number of the step; None: no step is running
        """
        self._said_step = number

    def next_round(self) -> str | None:
        """Begin a round.

        :returns: None, or the reason why the process counts as hung, for errors
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
        """Tell whether a number of rounds reaches a limit."""
        return limit is not None and self.round_seconds is not None and rounds >= round(limit / self.round_seconds)

"""Counts an engine's steps and tokens since its start, and computes recent rates."""

from __future__ import annotations

from collections import deque

from attrs import frozen

__all__ = ["Metrics"]

WINDOW_SECONDS = 10.0
"""Rates look back this many seconds: long enough to be steady, short enough to follow the load."""


@frozen
class _Step:
    end: float
    seconds: float
    prompt_tokens: int
    completion_tokens: int


class Metrics:
    """Sums steps and tokens, and computes rates over the recent steps. Idle time does not lower a rate.

    :ivar steps: steps executed
    :ivar prompt_tokens: prompt tokens computed
    :ivar completion_tokens: tokens generated
    """

    def __init__(self) -> None:
        self.steps: int = 0
        self.prompt_tokens: int = 0
        self.completion_tokens: int = 0
        self._recent: deque[_Step] = deque()
        self._seconds = 0.0
        self._recent_prompt = 0
        self._recent_completion = 0

    def add_step(self, *, start: float, end: float, prompt_tokens: int, completion_tokens: int) -> None:
        """Count one step; times are in seconds of the monotonic clock."""
        self.steps += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self._add(_Step(end, end - start, prompt_tokens, completion_tokens), 1)
        while self._recent[0].end < end - WINDOW_SECONDS:
            self._add(self._recent[0], -1)

    def _add(self, step: _Step, sign: int) -> None:
        if sign > 0:
            self._recent.append(step)
        else:
            self._recent.popleft()
        self._seconds += sign * step.seconds
        self._recent_prompt += sign * step.prompt_tokens
        self._recent_completion += sign * step.completion_tokens

    @property
    def prompt_tok_per_sec(self) -> float:
        return self._recent_prompt / self._seconds if self._seconds > 0 else 0.0

    @property
    def completion_tok_per_sec(self) -> float:
        return self._recent_completion / self._seconds if self._seconds > 0 else 0.0

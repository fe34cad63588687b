"""Keeps the times of steps without prompts, by number of tokens."""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low
from typing import Final

__all__ = ["NUM_SAMPLES", "StepTimes", "size_of"]

NUM_SAMPLES: Final = 9
"""A step time is the median of this many samples, so that a single interrupted step does not count."""
EXTRAPOLATED_TOKENS: Final = 4
"""The time of a step can be guessed for at most this many tokens more than were ever measured, or twice as many.
Without this bound, 16 sequences drafted 96 tokens in their first step with drafts, which took as long as eight
without."""
MAX_AGE: Final = 128
"""A time that was not measured again in this many steps is forgotten: other programs may have slowed it down. With 512,
a few steps measured on a busy machine kept edits at 3 drafts per step, 2.8 times the rate without drafts instead of
3.6."""


def size_of(num_tokens: int, bits: int = 5) -> int:
    """Return the size class of a number of tokens: step times are kept per size class.

    Numbers with equal leading bits share a class: among many tokens, a few more or less take as long. With three bits,
    17 rows shared the time of 16, which take an eighth less, and 16 sequences had drafts that could not pay.
    """
    shift = max(num_tokens.bit_length() - bits, 0)
    return num_tokens >> shift << shift


class StepTimes:
    """Keeps the times of recent steps without prompts, by number of tokens: one per decoding sequence, plus drafts."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._noted_at: dict[int, int] = {}
        self._num_steps = 0
        self._curve: list[tuple[int, float]] | None = []

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record how long a step took."""
        size = size_of(num_tokens)
        samples = self._seconds.get(size)
        if samples is None:
            samples = self._seconds[size] = deque(maxlen=NUM_SAMPLES)
        samples.append(seconds)
        self._curve = None
        self._num_steps += 1
        self._noted_at[size] = self._num_steps
        if self._num_steps % MAX_AGE == 0:
            self._forget_old()

    def forget(self, num_tokens: int) -> None:
        """Keep only the last two times of steps with ``num_tokens`` tokens: the next two samples then decide the
        median.
        """
        samples = self._seconds.get(size_of(num_tokens))
        while samples and len(samples) > 2:
            samples.popleft()

    def clear(self) -> None:
        """Forget everything."""
        self._seconds.clear()
        self._noted_at.clear()
        self._curve = None

    def nearest(self, num_tokens: int) -> float | None:
        """Return the time in seconds of a step with ``num_tokens`` tokens, or with the nearest measured number; None if
        no time is known.
        """
        samples = self._seconds.get(size_of(num_tokens))
        if not samples:
            size = size_of(num_tokens)
            known = [(abs(size - other), other) for other in self._seconds]
            if not known:
                return None
            samples = self._seconds[min(known)[1]]
        return median_low(samples)

    def expected(self, num_tokens: int) -> float:
        """Return the expected time in seconds of a step with ``num_tokens`` tokens; it never falls with their number.

        :returns: 0 if nothing was measured yet, infinity if ``num_tokens`` is too far beyond what was measured
        """
        curve = self._curve
        if curve is None:
            curve = self._curve = self._rising()
        if not curve:
            return 0.0
        size, seconds = first, first_seconds = curve[0]
        if num_tokens <= size:
            return seconds
        for next_size, next_seconds in curve[1:]:
            if num_tokens <= next_size:
                return seconds + (next_seconds - seconds) / (next_size - size) * (num_tokens - size)
            size, seconds = next_size, next_seconds
        if num_tokens > max(2 * size, size + EXTRAPOLATED_TOKENS):
            return math.inf
        # Each further token takes about the average time per token so far. The slope of the last ones says less: matrix
        # products process rows in tiles, so the fifth row may take as long as all before it, and the next three
        # nothing.
        guessed = seconds / (size + EXTRAPOLATED_TOKENS)
        slope = max((seconds - first_seconds) / (size - first), guessed / 2) if size > first else guessed
        return seconds + slope * (num_tokens - size)

    def _rising(self) -> list[tuple[int, float]]:
        """Return the measured times by rising number of tokens, made monotonic: a time is at most that of any larger
        number.
        """
        curve: list[tuple[int, float]] = []
        least = math.inf
        for size in sorted(self._seconds, reverse=True):
            least = min(least, median_low(self._seconds[size]))
            curve.append((size, least))
        return curve[::-1]

    def _forget_old(self) -> None:
        for size, noted_at in list(self._noted_at.items()):
            if noted_at <= self._num_steps - MAX_AGE:
                del self._noted_at[size], self._seconds[size]

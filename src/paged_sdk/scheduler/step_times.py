"""Keeps how long steps take that only generate, by the number of their tokens."""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low
from typing import Final

__all__ = ["NUM_SAMPLES", "StepTimes", "size_of"]

NUM_SAMPLES: Final = 9
"""The time of a step is the median of so many: one that others interrupt does not show."""
UNKNOWN: Final = 4
"""A step may have so many tokens more than any before it, or twice as many: what it takes is then a guess. Without this
bound, 16 texts drafted 96 tokens in their first step with drafts, which took as long as eight without."""
LASTS: Final = 128
"""After so many steps a time that was not seen again is forgotten: it may have been one that others interrupted. With
512, a few steps that were measured while others used the machine kept edits at 3 drafts a step, 2.8 times the plain
rate instead of 3.6."""


def size_of(num_tokens: int, bits: int = 5) -> int:
    """Return the number of tokens under which what is known of steps with so many is kept.

    Numbers whose leading bits are equal share it: a few more or less of many take as long. With three bits, 17 rows
    shared the time of 16, which take an eighth less, and 16 texts had drafts that could not pay.
    """
    shift = max(num_tokens.bit_length() - bits, 0)
    return num_tokens >> shift << shift


class StepTimes:
    """Keeps how long the last steps without prompts took, by the number of tokens that they computed: one for each text
    that is generated, and its drafts.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._noted_at: dict[int, int] = {}
        self._num_steps = 0
        self._curve: list[tuple[int, float]] | None = []

    def note(self, num_tokens: int, seconds: float) -> None:
        """Take in how long a step took."""
        size = size_of(num_tokens)
        samples = self._seconds.get(size)
        if samples is None:
            samples = self._seconds[size] = deque(maxlen=NUM_SAMPLES)
        samples.append(seconds)
        self._curve = None
        self._num_steps += 1
        self._noted_at[size] = self._num_steps
        if self._num_steps % LASTS == 0:
            self._forget_old()

    def forget(self, num_tokens: int) -> None:
        """Forget most of what was seen of steps with so many tokens: the next two decide the median."""
        samples = self._seconds.get(size_of(num_tokens))
        while samples and len(samples) > 2:
            samples.popleft()

    def clear(self) -> None:
        """Forget everything."""
        self._seconds.clear()
        self._noted_at.clear()
        self._curve = None

    def nearest(self, num_tokens: int) -> float | None:
        """Return how many seconds a step takes with as many tokens, or with the nearest number that is known."""
        samples = self._seconds.get(size_of(num_tokens))
        if not samples:
            size = size_of(num_tokens)
            known = [(abs(size - other), other) for other in self._seconds]
            if not known:
                return None
            samples = self._seconds[min(known)[1]]
        return median_low(samples)

    def expected(self, num_tokens: int) -> float:
        """Return how many seconds a step with so many tokens should take: it never falls with their number.

        :returns: 0 if nothing is known yet, and infinity where nothing can be guessed
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
        if num_tokens > max(2 * size, size + UNKNOWN):
            return math.inf
        # A token more takes about as long as those so far on average. The last ones say less: products take rows in
        # tiles, so that the fifth may take as long as all before it, and the next three nothing.
        guessed = seconds / (size + UNKNOWN)
        slope = max((seconds - first_seconds) / (size - first), guessed / 2) if size > first else guessed
        return seconds + slope * (num_tokens - size)

    def _rising(self) -> list[tuple[int, float]]:
        """Return what is known, by rising number of tokens: fewer tokens take no longer than more were seen to take."""
        curve: list[tuple[int, float]] = []
        least = math.inf
        for size in sorted(self._seconds, reverse=True):
            least = min(least, median_low(self._seconds[size]))
            curve.append((size, least))
        return curve[::-1]

    def _forget_old(self) -> None:
        for size, noted_at in list(self._noted_at.items()):
            if noted_at <= self._num_steps - LASTS:
                del self._noted_at[size], self._seconds[size]

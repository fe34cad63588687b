"""Keeps how long steps take that only generate, by the number of their tokens."""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import Final

__all__ = ["NUM_SAMPLES", "StepTimes", "size_of"]

NUM_SAMPLES: Final = 9
"""The time of a step is the median of so many: one that others interrupt does not show."""
GUESSED_SLOPE: Final = 0.02
"""So much of a step's time is one more token expected to add before larger steps were seen. It is less than anything
measured, so that they are tried once."""


def size_of(num_tokens: int) -> int:
    """Return the number of tokens under which the times of steps with so many are kept.

    Numbers whose three leading bits are equal share it: a few more or less of many take as long.
    """
    shift = max(num_tokens.bit_length() - 3, 0)
    return num_tokens >> shift << shift


class StepTimes:
    """Keeps how long the last steps without prompts took, by the number of tokens that they computed: one for each text
    that is generated, and its drafts.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._curve: list[tuple[int, float]] | None = []

    def note(self, num_tokens: int, seconds: float) -> None:
        """Take in how long a step took."""
        size = size_of(num_tokens)
        samples = self._seconds.get(size)
        if samples is None:
            samples = self._seconds[size] = deque(maxlen=NUM_SAMPLES)
        samples.append(seconds)
        self._curve = None

    def forget(self, num_tokens: int) -> None:
        """Forget most of what was seen of steps with so many tokens: the next two decide the median."""
        samples = self._seconds.get(size_of(num_tokens))
        while samples and len(samples) > 2:
            samples.popleft()

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

        :returns: 0 if nothing is known yet
        """
        if self._curve is None:
            points = [(size, median_low(self._seconds[size])) for size in sorted(self._seconds)]
            self._curve = _rising(points)
        curve = self._curve
        if not curve:
            return 0.0
        size, seconds = curve[0]
        if num_tokens <= size:
            return seconds
        for next_size, next_seconds in curve[1:]:
            if num_tokens <= next_size:
                return seconds + (next_seconds - seconds) * (num_tokens - size) / (next_size - size)
            size, seconds = next_size, next_seconds
        return seconds + curve[0][1] * GUESSED_SLOPE * (num_tokens - size)


def _rising(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points with the least changes that let values rise: neighbours that fall get their mean."""
    pools: list[tuple[float, int]] = []
    for _, value in points:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            other, other_count = pools.pop()
            mean = (mean * count + other * other_count) / (count + other_count)
            count += other_count
        pools.append((mean, count))
    values = [mean for mean, count in pools for _ in range(count)]
    return [(size, value) for (size, _), value in zip(points, values, strict=True)]

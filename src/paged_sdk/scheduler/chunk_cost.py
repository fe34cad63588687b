"""Estimates how long chunks of prompts take, from the times that earlier ones took."""

from __future__ import annotations

from typing import Final

__all__ = ["ChunkCost"]

# Features are scaled so that each explains about as much of a chunk as the others: a chunk by itself like 32 of its
# tokens, 1,024 earlier tokens like twice the work per token. Only the first guess depends on it.
_CHUNK: Final = 32.0
_DEPTH: Final = 1024.0
_NUM_FEATURES: Final = 4
_NOISE: Final = 0.1
"""Times of equal chunks differ by about so much of themselves."""
_MEMORY: Final = 0.97
"""Each chunk weighs so much less than the next. With 0.9 the estimate follows noise: chunks of a simulated prompt were
up to twice too large; with 0.98 it takes a second longer to notice that the machine has become slower."""
_MEAN_WEIGHT: Final = 1 / 4
_LEAST: Final = 1e-3
_CLOCK: Final = 1e-6
"""No chunk takes less, whatever a coarse clock says; far smaller units would overflow."""


class ChunkCost:
    """Estimates how long a chunk of a prompt takes: some time for itself, some for each of its tokens, and of both more
    the more tokens precede them, since attention reads these.

    The four weights change slowly, so a Kalman filter follows them (recursive least squares that forgets). Chunks of
    one length at one depth do not tell them apart: then all go on, in proportion to what is uncertain about each.
    """

    def __init__(self) -> None:
        # Everything is in units of the time of one token of the first chunk, so that numbers are near 1.
        self._unit = 0.0
        self._weights = [0.0] * _NUM_FEATURES
        self._spread: list[list[float]] = []
        self._mean = 1.0

    @property
    def is_known(self) -> bool:
        """Say whether a chunk was seen yet."""
        return self._unit > 0

    def per_token(self, depth: float) -> float:
        """Return how many seconds a chunk takes longer for one more token.

        :param depth: how many tokens precede it
        """
        _, _, token, pair = self._weights
        return self._unit * max(token + pair * depth / _DEPTH, _LEAST)

    @property
    def mean(self) -> float:
        """Return how many seconds the last chunks took per token, with everything."""
        return self._unit * max(self._mean, _LEAST)

    def note(self, num_tokens: int, depth: float, seconds: float) -> None:
        """Take in a chunk.

        :param depth: how many tokens preceded each of its tokens, on average
        """
        if not self._unit:
            if seconds < _CLOCK:
                return
            self._unit = seconds / num_tokens
            self._weights = [0.0, 0.0, 1.0, 0.0]
            self._spread = [[float(row == column) for column in range(_NUM_FEATURES)] for row in range(_NUM_FEATURES)]
        measured = max(seconds / self._unit, 0.0)
        features = (_CHUNK, _CHUNK * depth / _DEPTH, num_tokens, num_tokens * depth / _DEPTH)
        self._correct(features, measured, least=max(self._mean * num_tokens / 4, _LEAST))
        self._mean += _MEAN_WEIGHT * (min(measured / num_tokens, 2 * self._mean) - self._mean)

    def _correct(self, features: tuple[float, ...], measured: float, *, least: float) -> None:
        """Correct the weights by a step of the filter.

        :param least: what to expect at least, if the weights have gone wrong
        """
        weights, spread = self._weights, self._spread
        expected = max(_dot(weights, features), least)
        error = min(measured - expected, expected / 2)  # what is beyond is an interruption
        gains = [_dot(row, features) for row in spread]
        total = _dot(gains, features) + (_NOISE * expected) ** 2
        for row, gain in enumerate(gains):
            weights[row] += gain * error / total
            for column, other in enumerate(gains):
                spread[row][column] = (spread[row][column] - gain * other / total) / _MEMORY
        # No weight is negative: what one has too little, those that vary with it have too much.
        for row in range(_NUM_FEATURES):
            if weights[row] < 0:
                excess = weights[row] / spread[row][row]
                for column in range(_NUM_FEATURES):
                    weights[column] -= spread[column][row] * excess
        # What no chunk tells about is forgotten as far as at the start, and not further.
        widest = max(spread[row][row] for row in range(_NUM_FEATURES))
        if widest > 1:
            self._spread = [[cell / widest for cell in row] for row in spread]


def _dot(first: list[float], second: tuple[float, ...]) -> float:
    return sum(one * other for one, other in zip(first, second, strict=True))

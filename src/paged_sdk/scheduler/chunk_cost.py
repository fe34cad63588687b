"""Estimates how long prefill chunks take, from the times of earlier chunks."""

from __future__ import annotations

from typing import Final

__all__ = ["ChunkCost"]

# Features are scaled so that each explains about as much of a chunk's time as the others: the fixed cost of a chunk
# like 32 of its tokens, 1,024 earlier tokens like the cost of one token. The scales only matter for the first
# estimates.
_CHUNK: Final = 32.0
_DEPTH: Final = 1024.0
_NUM_FEATURES: Final = 4
_NOISE: Final = 0.1
"""Relative spread of the times of equal chunks."""
_MEMORY: Final = 0.97
"""Weight of each chunk relative to the next. With 0.9 the estimate follows noise: chunks of a simulated prompt were up
to twice too large; with 0.98 it takes a second longer to notice that the machine has become slower."""
_MEAN_WEIGHT: Final = 1 / 4
_LEAST: Final = 1e-3
_CLOCK: Final = 1e-6
"""Shortest first chunk that is used, in seconds. A coarse clock may report less, and units that small would
overflow."""


class ChunkCost:
    """Estimates how long a prefill chunk takes: a fixed cost plus a cost per token, each of which grows with the number
    of earlier tokens, because attention reads their KV.

    A Kalman filter follows the four weights, which change slowly (recursive least squares with forgetting). Chunks of
    one length at one depth cannot tell the weights apart: the filter then corrects all of them in proportion to their
    uncertainty.
    """

    def __init__(self) -> None:
        # All times are in units of the first chunk's time per token, so that numbers are near 1.
        self._unit = 0.0
        self._weights = [0.0] * _NUM_FEATURES
        self._spread: list[list[float]] = []
        self._mean = 1.0

    @property
    def is_known(self) -> bool:
        """Return whether any chunk was measured yet."""
        return self._unit > 0

    def per_token(self, depth: float) -> float:
        """Return how many seconds one more token adds to a chunk.

        :param depth: how many tokens precede it
        """
        _, _, token, pair = self._weights
        return self._unit * max(token + pair * depth / _DEPTH, _LEAST)

    @property
    def mean(self) -> float:
        """Return the mean time of recent chunks per token in seconds, fixed costs included."""
        return self._unit * max(self._mean, _LEAST)

    def note(self, num_tokens: int, depth: float, seconds: float) -> None:
        """Record the time of a chunk.

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
        """Update the weights with one step of the filter.

        :param least: lower bound on the predicted time, in case the weights are wrong
        """
        weights, spread = self._weights, self._spread
        expected = max(_dot(weights, features), least)
        error = min(measured - expected, expected / 2)  # anything beyond is an interruption
        gains = [_dot(row, features) for row in spread]
        total = _dot(gains, features) + (_NOISE * expected) ** 2
        for row, gain in enumerate(gains):
            weights[row] += gain * error / total
            for column, other in enumerate(gains):
                spread[row][column] = (spread[row][column] - gain * other / total) / _MEMORY
        # Weights are not negative: raise a negative one to 0 and lower those that are correlated with it.
        for row in range(_NUM_FEATURES):
            if weights[row] < 0:
                excess = weights[row] / spread[row][row]
                for column in range(_NUM_FEATURES):
                    weights[column] -= spread[column][row] * excess
        # The uncertainty of weights that no chunk informs about grows back to its initial value at most.
        widest = max(spread[row][row] for row in range(_NUM_FEATURES))
        if widest > 1:
            self._spread = [[cell / widest for cell in row] for row in spread]


def _dot(first: list[float], second: tuple[float, ...]) -> float:
    return sum(one * other for one, other in zip(first, second, strict=True))

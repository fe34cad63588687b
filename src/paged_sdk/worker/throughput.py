"""Log throughput every few seconds of work."""

from __future__ import annotations

from paged_sdk.logs import get_logger
from paged_sdk.types.stats import ModelStats

__all__ = ["ThroughputLog"]

_log = get_logger(__name__)

EVERY_SECONDS = 5.0


class ThroughputLog:
    """Logs at most one line per :data:`EVERY_SECONDS`, and none while the engine is idle."""

    def __init__(self) -> None:
        self._last = 0.0

    def step_done(self, stats: ModelStats, now: float) -> None:
        """Log a line after this step if one is due.

        :param now: seconds of the monotonic clock
        """
        if now - self._last < EVERY_SECONDS:
            return
        self._last = now
        _log.info(
            "%.1f tok/s generated, %.1f tok/s prompt; %d running, %d waiting; KV blocks %d of %d; prefix hits %.0f %%",
            stats.completion_tok_per_sec,
            stats.prompt_tok_per_sec,
            stats.running,
            stats.waiting,
            stats.blocks_used,
            stats.blocks_total,
            100 * stats.prefix_hit_rate,
        )

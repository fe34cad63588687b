"""Holds one of several engines, and adds up their statistics."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, fields, frozen

from paged_sdk.calls.loaded_adapters import Adapters
from paged_sdk.errors import EngineDeadError, PagedError
from paged_sdk.types.stats import ModelStats
from paged_sdk.worker.engine_access import EngineAccess

__all__ = ["Replica", "left", "past", "summed"]


@frozen(eq=False)
class Replica:
    """Holds one of the engines.

    :ivar adapters: the adapters loaded there
    :ivar num_blocks: how many blocks of prefixes the engine can cache
    """

    worker: EngineAccess
    adapters: Adapters
    num_blocks: int

    @property
    def why_not(self) -> PagedError | None:
        """Return the error with which the engine refuses requests; None if it accepts them."""
        try:
            self.worker.check()
        except PagedError as error:
            return error
        return None


def summed(every: Sequence[ModelStats], *, speed_ups: Sequence[ModelStats] = ()) -> ModelStats:
    """Return the sum of statistics; the speed-up by drafts is the mean of ``speed_ups``."""
    sums = {each.name: sum(getattr(stats, each.name) for stats in every) for each in fields(ModelStats)}
    mean = sum(each.draft_speed_up for each in speed_ups) / len(speed_ups) if speed_ups else 1.0
    return ModelStats(**sums | {"draft_speed_up": mean})


def left(replica: Replica) -> ModelStats:
    """Return an engine's share of the statistics: of a dead engine only its counts, of a closed one no free blocks,
    since nothing can use them.
    """
    stats, why_not = replica.worker.stats, replica.why_not
    if isinstance(why_not, EngineDeadError):
        return past(stats)
    held = stats.blocks_used + stats.blocks_cached
    return stats if why_not is None else evolve(stats, blocks_total=held, blocks_free=0)


def past(stats: ModelStats) -> ModelStats:
    """Return the counts of an engine that is gone, without memory and throughput."""
    return evolve(stats.at_rest(), blocks_total=0, blocks_free=0, prompt_tok_per_sec=0.0, completion_tok_per_sec=0.0)

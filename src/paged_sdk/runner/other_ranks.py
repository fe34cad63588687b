"""Defines how a step is run on the other ranks of a tensor-parallel model."""

from __future__ import annotations

from typing import Protocol

from paged_sdk.kernels.step import InsertedRows
from paged_sdk.types.step import Step

__all__ = ["OtherRanks"]


class OtherRanks(Protocol):
    """Drives the processes that hold the other shards of a tensor-parallel model."""

    def run(self, step: Step, inserted: InsertedRows | None) -> None:
        """Start a step on the other ranks; this process must compute it too.

        :param inserted: vectors that replace embeddings of the step's tokens
        :raises EngineDeadError: another rank has ended
        """
        ...

    def choose(self, way: str) -> None:
        """Make the other ranks run the next step in this way (a value of :class:`Way`) instead of eagerly."""
        ...

    def check(self) -> None:
        """Check that no rank has ended, so that the results computed since are complete.

        :raises EngineDeadError: another rank has ended
        """
        ...

    def close(self) -> None:
        """End the other ranks; a second call does nothing."""
        ...

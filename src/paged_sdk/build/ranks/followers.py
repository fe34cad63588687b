"""Drives the other ranks of a model from rank 0."""

from __future__ import annotations

from contextlib import suppress
from typing import Final, Protocol

from paged_sdk.errors import EngineError
from paged_sdk.kernels.step import InsertedRows
from paged_sdk.parallel.group import Group
from paged_sdk.parallel.messages import END, WAY, StepWriter
from paged_sdk.parallel.rendezvous import CheckCancelled
from paged_sdk.system.owner import Owner
from paged_sdk.types.step import Step

__all__ = ["Followers", "Ranks"]

_END_SECONDS: Final = 5.0


class Ranks(Protocol):
    """Joins, watches and ends the other ranks, depending on how they were started.

    :ivar group: all ranks; this process is rank 0
    """

    group: Group

    def check(self) -> None:
        """Check that all ranks are still loading. Do not call this once they are connected.

        :raises ModelLoadError: a rank has failed to load its shard
        """
        ...

    def join(self, check_cancelled: CheckCancelled) -> None:
        """Wait until all ranks have loaded their shards, and connect to them.

        :param check_cancelled: called regularly; an exception that it raises ends the wait
        :raises ModelLoadError: a rank has failed to load its shard
        """
        ...

    def end(self, seconds: float, error: BaseException | None) -> None:
        """End the other ranks.

        :param seconds: how long to wait for ranks that have been told to end; 0: they have not been told
        :param error: the error that ended this process's part; None: no error
        """
        ...


class Followers:
    """Implements :class:`~paged_sdk.runner.other_ranks.OtherRanks`, whether this process started the ranks or not.

    A follower ends when it is told to, when its connections break, and when this process ends for any reason.

    :ivar group: all ranks; this process is rank 0
    """

    def __init__(self, ranks: Ranks) -> None:
        self.group: Group = ranks.group
        self._ranks = ranks
        self._writer = StepWriter()
        self._owner = Owner()
        self._is_open = True

    def watched(self, check_cancelled: CheckCancelled) -> CheckCancelled:
        """Return a callback for loading and set-up on this rank that also checks the other ranks: it raises a
        ModelLoadError if a rank fails while loading, and an EngineDeadError if one ends after the ranks are connected.
        """

        def going_on() -> None:
            if self.group.is_joined:
                self.group.check()
            else:
                self._ranks.check()
            check_cancelled()

        return going_on

    def join(self, check_cancelled: CheckCancelled) -> None:
        """Wait until all ranks have loaded their shards, and connect to them.

        :param check_cancelled: called regularly; an exception that it raises ends the wait
        :raises ModelLoadError: a rank has failed to load its shard
        """
        self._ranks.join(check_cancelled)

    def run(self, step: Step, inserted: InsertedRows | None) -> None:
        """Start a step on the other ranks; this process must compute it too.

        :param inserted: vectors that replace embeddings of the step's tokens
        :raises EngineDeadError: another rank has ended
        """
        self.group.send_message(self._writer.message(step, inserted))

    def choose(self, way: str) -> None:
        """Make the other ranks run the next step in this way instead of eagerly."""
        self.group.send_message((WAY, way))

    def check(self) -> None:
        """Check that no rank has ended, so that the results computed since are complete.

        :raises EngineDeadError: another rank has ended
        """
        self.group.check()

    def close(self, error: BaseException | None = None) -> None:
        """End the other ranks. A second call, or one in a forked child, does nothing.

        :param error: the error that ended this process's part; None: no error
        """
        if not self._is_open or not self._owner.is_here:
            return
        self._is_open = False
        seconds = 0.0
        if error is None and self.group.is_joined:
            with suppress(EngineError):
                self.group.send_message((END,))
                seconds = _END_SECONDS
        self._ranks.end(seconds, error)
        self.group.end()
        self.group.leave()

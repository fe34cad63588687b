"""Run the ranks of a group as threads of one process, which is quicker than processes and just as exact."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import TypeVar

import pytest
from attrs import evolve
from torch._C._distributed_c10d import HashStore

from paged_sdk import EngineDeadError
from paged_sdk.build import assembly
from paged_sdk.build.loading import Loading
from paged_sdk.build.ranks.part import ModelPart
from paged_sdk.build.ranks.ranks import RankPlacement
from paged_sdk.kernels.native.library import Workspace, load
from paged_sdk.kernels.native.ranks import make_shared_memory
from paged_sdk.parallel.group import Group

__all__ = ["free_port", "ranks_as_threads", "run_ranks"]

_T = TypeVar("_T")


def free_port() -> int:
    """Return a port that nobody has."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


def run_ranks(size: int, run: Callable[[Group], _T]) -> list[_T]:
    """Run a function on every rank of a group, and return what each gives.

    What it raises on one rank ends all of them, and is raised here, rather than what the others make of their loss.
    """
    store = HashStore()
    errors: list[Exception] = []

    def rank(number: int) -> _T:
        group = Group(number, size)
        group.join(store)
        try:
            return run(group)
        except Exception as error:
            errors.append(error)
            group.end()  # the others would wait for this rank
            raise
        finally:
            group.leave()

    with ThreadPoolExecutor(size) as pool:
        runs = [pool.submit(rank, number) for number in range(size)]
    if errors:
        raise errors[0]
    return [each.result() for each in runs]


@contextmanager
def ranks_as_threads() -> Iterator[None]:
    """Have models that are built in the block hold their other ranks as threads: a process takes seconds to start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "ChildRanks", ThreadRanks)
        yield


class ThreadRanks:
    """Stands where :class:`~paged_sdk.build.ranks.child_ranks.ChildRanks` does: its ranks load and compute the same
    parts, share memory likewise, and hear through gloo what is to be computed.

    :ivar group: all ranks, the first of which is the caller's
    """

    def __init__(self, loading: Loading, placements: Sequence[RankPlacement]) -> None:
        size, library = len(placements), load()
        self.group: Group = Group(0, size)
        self._store = HashStore()
        self._all_loaded = threading.Semaphore(0)
        memory = None if library is None else make_shared_memory(library, size)
        groups = [self.group, *(Group(rank, size) for rank in range(1, size))]
        if library is not None and memory is not None:
            for group in groups:
                group.share(library, memory)
            os.close(memory)

        def follow(group: Group, placement: RankPlacement) -> None:
            workspace = None if library is None else Workspace(library, num_threads=placement.num_threads)
            own = evolve(
                loading, settings=placement.of(loading.settings), workspace=workspace, check_cancelled=lambda: None
            )
            part = ModelPart.load(own, group)
            self._all_loaded.release()
            group.join(self._store)
            try:
                part.follow(group)
            finally:
                group.leave()

        self._threads = ThreadPoolExecutor(size - 1)
        self._ends = [self._threads.submit(follow, *each) for each in zip(groups[1:], placements[1:], strict=True)]

    def check(self) -> None:
        """Raise what has ended another rank."""
        for end in self._ends:
            if end.done():
                end.result()

    def join(self, check_cancelled: Callable[[], None]) -> None:
        """Wait until all have loaded their parts, and connect to them."""
        for _ in self._ends:
            while not self._all_loaded.acquire(timeout=0.05):
                self.check()
                check_cancelled()
        self.group.join(self._store)

    def end(self, seconds: float, error: BaseException | None) -> None:
        """Wait until the others have ended, and raise what has ended them unless that was to be."""
        if not seconds:
            self.group.end()
            self.group.leave()
        self._threads.shutdown()
        with nullcontext() if seconds else suppress(EngineDeadError):
            for end in self._ends:
                end.result()

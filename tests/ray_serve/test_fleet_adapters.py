"""Replicas that come later have the adapters that the others have, by the same names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from paged_sdk.ray.adapters import FleetAdapters
from paged_sdk.routing.replica import Replica

pytestmark = pytest.mark.anyio


class Paths:
    """Stands for a replica's adapters: it knows where each comes from, and waits where that is said."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}
        self.may_end: dict[str, anyio.Event] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.paths)

    async def load(self, path: str, name: str) -> None:
        await self._wait(path)
        self.paths[name] = path

    async def unload(self, name: str) -> None:
        await self._wait(self.paths.pop(name))

    async def _wait(self, path: str) -> None:
        if path in self.may_end:
            await self.may_end[path].wait()


def fleet(*every: Paths) -> FleetAdapters:
    worker: Any = SimpleNamespace(check=lambda: None, why_not=None)
    worker.replicas = [replica(each) for each in every]
    return FleetAdapters(worker)


def replica(adapters: Any) -> Replica:
    worker: Any = SimpleNamespace(check=lambda: None, why_not=None)
    return Replica(worker, adapters, 4096)


async def settled() -> None:
    for _ in range(5):
        await anyio.lowlevel.checkpoint()


async def test_adapters_that_are_loaded_at_once_keep_their_own_paths() -> None:
    first, second, later = Paths(), Paths(), Paths()
    second.may_end = {"prose/": anyio.Event(), "poems/": anyio.Event()}
    adapters = fleet(first, second)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(adapters.load, "prose/", "prose")
        await settled()
        tasks.start_soon(adapters.load, "poems/", "poems")
        await settled()
        second.may_end["poems/"].set()
        await settled()
        second.may_end["prose/"].set()
    await adapters.bring(replica(later))
    assert later.paths == {"prose": "prose/", "poems": "poems/"}


async def test_what_is_unloaded_comes_to_no_later_replica_though_nobody_waits_for_the_end() -> None:
    first, later = Paths(), Paths()
    adapters = fleet(first)
    await adapters.load("poems/", "poems")
    first.may_end["poems/"] = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(adapters.unload, "poems")
        await settled()
        tasks.cancel_scope.cancel()
    await adapters.bring(replica(later))
    assert later.paths == {}

"""Adapters of several replicas, which have the same whatever happens while they are loaded and unloaded."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from paged_sdk import AdapterError, EngineDeadError, RequestBuilder
from paged_sdk.calls.loaded_adapters import LoadedAdapters
from paged_sdk.routing.adapters import ReplicaAdapters
from paged_sdk.routing.replica import Replica
from paged_sdk.routing.routed_worker import RoutedWorker
from paged_sdk.testing import FakeModel, fake_model
from paged_sdk.types.adapter import AdapterUse
from slow_fakes import slow_fake

pytestmark = pytest.mark.anyio


class Bank:
    """Stands for what keeps a replica's adapters: reading one waits until it may end, and fails where that is said."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}
        self.may_end: dict[str, threading.Event] = {}
        self.begun: set[str] = set()
        self.errors: dict[str, Exception] = {}

    def read(self, location: str) -> Any:
        self.begun.add(location)
        if location in self.may_end:
            assert self.may_end[location].wait(30)
        if location in self.errors:
            raise self.errors[location]
        return SimpleNamespace(location=location, use=lambda number, name: AdapterUse(number, name, location.encode()))

    def take(self, fitted: Any) -> int:
        number = max(self.held, default=0) + 1
        self.held[number] = fitted.location
        return number

    def remove(self, number: int) -> None:
        del self.held[number]


class Several:
    """Holds replicas with banks.

    :ivar known: by replica the names of its adapters
    """

    def __init__(self, *fakes: FakeModel) -> None:
        self.fakes = fakes
        self.banks = [Bank() for _ in fakes]
        own = [each._insides.worker for each in fakes]
        self.each: list[Any] = [
            LoadedAdapters(worker, bank, {})  # type: ignore[arg-type]
            for worker, bank in zip(own, self.banks, strict=True)
        ]
        members = [Replica(worker, adapters, 4096) for worker, adapters in zip(own, self.each, strict=True)]
        self.adapters = ReplicaAdapters(RoutedWorker(members, 32))

    @property
    def known(self) -> list[tuple[str, ...]]:
        return [each.names for each in self.each]

    @property
    def held(self) -> list[list[str]]:
        return [list(bank.held.values()) for bank in self.banks]


async def until(condition: Any) -> None:
    with anyio.fail_after(30):
        while not condition():
            await anyio.sleep(0.001)


async def test_whoever_does_not_wait_for_the_end_of_unloading_leaves_no_replica_with_it() -> None:
    async with slow_fake() as first, fake_model("a") as second, fake_model("a") as third:
        several = Several(first, second, third)
        await several.adapters.load("poems", None)
        first._insides.adapters._uses["poems"] = several.each[0].use("poems")  # type: ignore[attr-defined]
        async with first.stream_chat_request(RequestBuilder().add_message("user", "x").with_adapter("poems")) as stream:
            await stream.__anext__()
            with anyio.move_on_after(0.02) as scope:
                await several.adapters.unload("poems")
            assert scope.cancelled_caught
            assert several.known == [(), (), ()]
            await until(lambda: several.held[1:] == [[], []])
        await until(lambda: several.held == [[], [], []])
        await several.adapters.load("poems", None)
        assert several.adapters.names == ("poems",)


async def test_whoever_does_not_wait_for_the_end_of_loading_leaves_no_replica_with_it() -> None:
    async with fake_model("a") as first, fake_model("a") as second, fake_model("a") as third:
        several = Several(first, second, third)
        several.banks[2].may_end["poems"] = threading.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(several.adapters.load, "poems", None)
            await until(lambda: "poems" in several.banks[2].begun)
            tasks.cancel_scope.cancel()
        several.banks[2].may_end["poems"].set()
        assert several.known == [(), (), ()]
        await until(lambda: several.held == [[], [], []])
        await several.adapters.load("poems", None)
        assert several.known == [("poems",)] * 3


async def test_an_adapter_that_cannot_be_loaded_everywhere_takes_none_with_it_that_came_meanwhile() -> None:
    async with fake_model("a") as first, fake_model("a") as second:
        several = Several(first, second)
        several.banks[1].may_end["bad"] = threading.Event()
        several.banks[1].errors["bad"] = AdapterError("it was made for another model")
        refused: list[AdapterError] = []

        async def load_bad() -> None:
            try:
                await several.adapters.load("bad", None)
            except AdapterError as error:
                refused.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load_bad)
            await until(lambda: "bad" in several.banks[1].begun)
            await several.adapters.load("good", None)
            several.banks[1].may_end["bad"].set()
        assert len(refused) == 1
        assert several.known == [("good",), ("good",)]


async def test_a_replica_that_dies_meanwhile_keeps_no_other_from_unloading() -> None:
    async with fake_model("a") as first, fake_model("a") as second, fake_model("a") as third:
        several = Several(first, second, third)
        await several.adapters.load(Path("folder") / "poems", "mine")
        unload = several.each[1].unload

        async def die(name: str) -> None:
            await unload(name)
            raise EngineDeadError("the device is gone")

        several.each[1].unload = die
        await several.adapters.unload("mine")
        assert several.held == [[], [], []]

"""Adapters of an engine elsewhere, whose loading somebody does not wait for any more."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from attrs import evolve
from loopback import remotely

from paged_sdk.calls.loaded_adapters import LoadedAdapters
from paged_sdk.remote.engine import RemoteEngine
from paged_sdk.remote.messages import Answer, FromEngine
from paged_sdk.testing import fake_model
from paged_sdk.types.adapter import AdapterUse
from talk import until

pytestmark = pytest.mark.anyio


class Bank:
    """Stands for what keeps an engine's adapters; reading one waits until it may end."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def read(self, location: str) -> Any:
        self.has_begun.set()
        assert self.may_end.wait(30)
        return SimpleNamespace(location=location, use=lambda number, name: AdapterUse(number, name, location.encode()))

    def take(self, fitted: Any) -> int:
        self.held[1] = fitted.location
        return 1

    def remove(self, number: int) -> None:
        del self.held[number]


@pytest.mark.parametrize("when", ["before it is heard of", "while it is read", "after it is done"])
async def test_a_load_that_nobody_waits_for_leaves_no_adapter(when: str) -> None:
    bank, own = Bank(), fake_model("a")
    there = LoadedAdapters(own._insides.worker, bank, {})  # type: ignore[arg-type]
    own._insides = evolve(own._insides, adapters=there)
    async with remotely(own) as (remote, _):
        adapters, engine = remote._insides.adapters, remote._insides.worker
        assert isinstance(engine, RemoteEngine)
        may_hear, take = threading.Event(), engine.take

        def take_late(message: FromEngine) -> None:
            assert not isinstance(message, Answer) or may_hear.wait(30)
            take(message)

        engine.take = take_late  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            if when == "after it is done":
                bank.may_end.set()
            if when == "before it is heard of":
                tasks.cancel_scope.cancel()
            tasks.start_soon(adapters.load, "poems", None)
            if when != "before it is heard of":
                await until(bank.has_begun.is_set if when == "while it is read" else lambda: bool(there.names))
                tasks.cancel_scope.cancel()
        may_hear.set()
        bank.may_end.set()
        await engine.reset_prefix_cache()  # what was asked before has begun by then
        await anyio.sleep(0.02)
        await until(lambda: not (there.names or bank.held or adapters.names))
        await adapters.load("poems", None)
        assert adapters.names == there.names == ("poems",)

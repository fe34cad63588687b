"""Manages the adapters of a loaded model by name."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Protocol

import anyio

from paged_sdk.config.build import AdapterSource
from paged_sdk.engine.engine import Engine
from paged_sdk.errors import ConfigError, InvalidRequestError
from paged_sdk.system.event_loop import wait_until_done
from paged_sdk.system.threads import in_own_thread
from paged_sdk.types.adapter import AdapterInfo, AdapterUse
from paged_sdk.worker.worker import Worker

if TYPE_CHECKING:  # it needs torch, which is loaded when a model is built
    from paged_sdk.adapters.bank import AdapterBank, FittedAdapter

__all__ = ["Adapters", "LoadedAdapters", "found_adapter"]


class Adapters(Protocol):
    """Gives access to a model's adapters by name; the methods mean the same as those of :class:`LoadedAdapters`."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def infos(self) -> tuple[AdapterInfo, ...]: ...

    def use(self, name: str | None) -> AdapterUse | None: ...

    async def load(self, path: str | PathLike[str], name: str | None) -> None: ...

    async def unload(self, name: str) -> None: ...


class LoadedAdapters:
    """Loads, unloads and looks up a model's adapters. May be used from any thread.

    An adapter is read in a helper thread; the engine's thread only adds it, between two steps.

    :param bank: holds the adapters; None: the model does not support any
    :param uses: the adapters loaded so far
    """

    def __init__(self, worker: Worker, bank: AdapterBank | None, uses: Mapping[str, AdapterUse]) -> None:
        self._worker = worker
        self._bank = bank
        self._uses: dict[str, AdapterUse | None] = dict(uses)  # None: it is being loaded
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the loaded adapters."""
        with self._lock:
            return tuple(name for name, use in self._uses.items() if use is not None)

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """Return a description of each loaded adapter."""
        with self._lock:
            return tuple(use.info for use in self._uses.values() if use is not None)

    def use(self, name: str | None) -> AdapterUse | None:
        """Return the adapter of a name; None for None.

        :raises InvalidRequestError: no adapter of that name is loaded
        """
        with self._lock:
            return found_adapter(self._uses, name)

    async def load(self, path: str | PathLike[str], name: str | None) -> None:
        """Implement :meth:`Model.load_adapter`."""
        source = AdapterSource.of("load_adapter", path, name)
        bank = self._bank
        if bank is None:
            raise ConfigError.of("load_adapter", source.location, "a model with weights, which this one has none of")
        self._worker.check()
        with self._lock:
            if source.name in self._uses:
                raise ConfigError.of("name", source.name, "a name that no other adapter has")
            self._uses[source.name] = None
        number = None
        try:
            fitted = await in_own_thread(partial(bank.read, source.location), "to read an adapter in")
            number = await self._taken_in(bank, fitted)
        finally:
            with self._lock:
                if number is None:
                    del self._uses[source.name]
                else:
                    self._uses[source.name] = fitted.use(number, source.name)

    async def _taken_in(self, bank: AdapterBank, fitted: FittedAdapter) -> int:
        """Add an adapter to the engine, and return its number. A cancelled caller still waits for this, one step at
        most; asyncio's own cancellation does not wait, and the adapter is removed again.
        """
        number = self._worker.post(partial(_add, bank, fitted))
        try:
            with anyio.CancelScope(shield=True):
                await wait_until_done(number)
            return number.result()
        except BaseException:
            number.add_done_callback(partial(self._let_go, bank))
            raise
        finally:
            del number  # an error's traceback holds this frame, and the future holds the error

    def _let_go(self, bank: AdapterBank, number: Future[int]) -> None:
        """Remove an adapter that no request has used, if it was added."""
        if number.exception() is None:
            self._worker.post(partial(_retire, bank, number.result(), Future()))

    async def unload(self, name: str) -> None:
        """Implement :meth:`Model.unload_adapter`."""
        with self._lock:
            use = self._uses.get(name) if isinstance(name, str) else None
            if use is not None:
                del self._uses[name]
        if use is None or self._bank is None:
            raise ConfigError.of(
                "name", name, f"the name of a loaded adapter: {', '.join(self.names) or 'there is none'}"
            )
        gone: Future[None] = Future()
        with anyio.CancelScope(shield=True):  # otherwise it would stay in memory without a name
            await self._worker.call(partial(_retire, self._bank, use.number, gone))
        await wait_until_done(gone)


def found_adapter(uses: Mapping[str, AdapterUse | None], name: str | None) -> AdapterUse | None:
    """Return the adapter of a name; None for None.

    :param uses: the adapters by name; None: still loading
    :raises InvalidRequestError: no adapter of that name is loaded
    """
    if name is None:
        return None
    use = uses.get(name)
    if use is None:
        names = ", ".join(each for each, loaded in uses.items() if loaded is not None)
        raise InvalidRequestError.of("adapter", name, f"one of {names}" if names else "None, as no adapter is loaded")
    return use


def _add(bank: AdapterBank, fitted: FittedAdapter, engine: Engine) -> int:
    return bank.take(fitted)


def _retire(bank: AdapterBank, number: int, gone: Future[None], engine: Engine) -> None:
    def let_go() -> None:
        bank.remove(number)
        gone.set_result(None)

    engine.retire_adapter(number, let_go)

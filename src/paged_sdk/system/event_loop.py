"""Reach a running event loop from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Protocol

import anyio.lowlevel

__all__ = ["EventLoop", "OutputLoop", "Waiter", "wait_until_done"]


class Waiter(Protocol):
    """Lets one task wait for one wake-up."""

    def set(self) -> None:
        """End the wait. Must be called on the loop's thread."""
        ...

    def wait(self) -> Awaitable[None]:
        """Wait until :meth:`set` is called."""
        ...


class OutputLoop(Protocol):
    """Runs the callbacks that deliver output to its readers. Output for equal loops is delivered in one callback."""

    def call_soon(self, callback: Callable[[], object]) -> bool:
        """Schedule ``callback``, from any thread and without waiting; False if the loop has ended."""
        ...


class EventLoop:
    """Refers to the asyncio loop or trio run of the calling task. Handles of the same loop are equal."""

    def __init__(self) -> None:
        token = _native_token()
        self._token = token
        self._thread = threading.get_ident()
        self._is_asyncio = hasattr(token, "call_soon_threadsafe")
        # Neither function waits for the loop.
        self._post = token.call_soon_threadsafe if self._is_asyncio else token.run_sync_soon

    @property
    def is_current(self) -> bool:
        """Tell whether the calling code runs in this loop."""
        if self._thread != threading.get_ident():
            return False
        try:
            return self._token is (asyncio.get_running_loop() if self._is_asyncio else _native_token())
        except RuntimeError:  # no loop runs here, or one of the other kind
            return False

    def call_soon(self, callback: Callable[[], object]) -> bool:
        """Schedule ``callback`` in the loop, from any thread and without waiting; False if the loop has ended."""
        try:
            self._post(callback)
        except RuntimeError:  # "Event loop is closed"; trio.RunFinishedError is one too
            return False
        return True

    def waiter(self) -> Waiter:
        """Make a waiter for a task of this loop: on asyncio a future, since anyio's event costs 2 us per chunk."""
        return _FutureWaiter(self._token.create_future()) if self._is_asyncio else anyio.Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EventLoop) and self._token is other._token

    def __hash__(self) -> int:
        return id(self._token)


async def wait_until_done(future: Future[Any]) -> None:
    """Wait until another thread settles a future, without blocking a thread. Cancelling the wait does not affect the
    future.
    """
    done, loop = anyio.Event(), EventLoop()
    future.add_done_callback(lambda _: loop.call_soon(done.set))
    await done.wait()


def _native_token() -> Any:
    """Return the running asyncio loop, or the token of the trio run."""
    return anyio.lowlevel.current_token().native_token


class _FutureWaiter:
    __slots__ = ("_future",)

    def __init__(self, future: Any) -> None:
        self._future = future

    def set(self) -> None:
        if not self._future.done():  # it is done if the waiting task has been cancelled
            self._future.set_result(None)

    def wait(self) -> Awaitable[None]:
        future: Awaitable[None] = self._future
        return future

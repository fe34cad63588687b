"""Run what talks to Ray, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any, TypeVar

from paged_sdk.system.threads import thread_must_start

__all__ = ["RayLoop"]

_T = TypeVar("_T")


class RayLoop:
    """Is an asyncio loop on a thread of its own: Ray knows asyncio alone, and a model serves any number of event loops,
    trio's too. What runs there has no context of the caller's, which says whose loop this is.

    :raises EngineError: the system gives this process no more threads
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="paged-sdk ray", daemon=True)
        with thread_must_start("to talk to Ray in"):
            self._thread.start()

    @property
    def is_current(self) -> bool:
        """Tell whether the calling code runs on its thread."""
        return self._thread is threading.current_thread()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run something there, from any thread and from finalizers; nothing if it has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, context=Context())

    def call_later(self, seconds: float, callback: Callable[[], object]) -> None:
        """Run something there after a while; nothing if it has ended by then."""
        self.call_soon(partial(self._loop.call_later, seconds, callback))

    def start(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a task there, from another thread."""
        return Context().run(asyncio.run_coroutine_threadsafe, coroutine, self._loop)

    def stop(self) -> None:
        """End all tasks and the thread, without waiting for it. Idempotent, and safe in finalizers."""
        self.call_soon(self._stopping.set)

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._stopping.wait())
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.close()

"""Run all communication with Ray on one thread."""

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
    """Runs an asyncio loop on its own thread: Ray supports asyncio only, and a model serves any number of event loops,
    trio's too. Callbacks and tasks get an empty context, because the caller's context names the caller's loop.

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
        """Return whether the calling code runs on the loop's thread."""
        return self._thread is threading.current_thread()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Schedule a callback in the loop, from any thread and from finalizers; ignored if the loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, context=Context())

    def call_later(self, seconds: float, callback: Callable[[], object]) -> None:
        """Schedule a callback in the loop after a delay; ignored if the loop has ended by then."""
        self.call_soon(partial(self._loop.call_later, seconds, callback))

    def start(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start a task in the loop, from another thread."""
        return Context().run(asyncio.run_coroutine_threadsafe, coroutine, self._loop)

    def stop(self) -> None:
        """End all tasks and the thread, without waiting for it. Idempotent, and safe in finalizers."""
        self.call_soon(self._stopping.set)

    def join(self) -> None:
        """Wait for the thread's end."""
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

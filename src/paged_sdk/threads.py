"""Start threads, and say with a typed error that the system gives a process no more of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from paged_sdk.errors import EngineError
from paged_sdk.event_loop import EventLoop

__all__ = ["in_anyio_thread", "in_own_thread", "thread_must_start"]

_T = TypeVar("_T")


@contextmanager
def thread_must_start(purpose: str) -> Iterator[None]:
    """Turn the failure to start a thread in the block into a typed error.

    :param purpose: what the thread is for
    :raises EngineError: the system gives this process no more threads
    """
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):  # Python has no class of its own for it
            raise
        raise EngineError(f"no thread {purpose}: the system gives this process no more ({error})") from error


async def in_own_thread(function: Callable[[], _T], purpose: str, *, abandon_on_cancel: bool = True) -> _T:
    """Run a function in a thread that is none of the 40 that anyio has for an event loop's applications: all of these
    may be waiting for what the function does.

    :param purpose: what the thread is for
    :param abandon_on_cancel: whoever is cancelled does not wait for its end
    :raises EngineError: the system gives this process no more threads
    """
    own = anyio.CapacityLimiter(1)
    with thread_must_start(purpose):
        return await anyio.to_thread.run_sync(function, abandon_on_cancel=abandon_on_cancel, limiter=own)


async def in_anyio_thread(function: Callable[[], _T], purpose: str) -> _T:
    """Run a function of the application's in a thread from which :mod:`anyio.from_thread` finds the event loop. That
    is one of anyio's, but none of the 40 of an application; it ends with the function as far as anyio lets it.

    :param purpose: what the thread is for
    :raises EngineError: the system gives this process no more threads
    """
    loop = EventLoop()

    def run() -> _T:
        try:
            return function()
        finally:
            _end_worker(loop)

    with thread_must_start(purpose):
        return await anyio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))


def _end_worker(loop: EventLoop) -> None:
    """Have this thread, if it is one of anyio's for asyncio, end with what it is doing. Otherwise it would wait for
    more, and a program whose event loop is stopped for it. anyio does the same to threads that have been idle for long,
    and has no public function for it.
    """
    thread: Any = threading.current_thread()
    stop, root_task = getattr(thread, "stop", None), getattr(thread, "root_task", None)
    if stop is not None and root_task is not None:
        loop.call_soon(partial(root_task.remove_done_callback, stop))
        stop()

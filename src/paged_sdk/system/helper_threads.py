"""Keep a pool of threads for work that would block an event loop."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, TypeAlias, TypeVar

import anyio

from paged_sdk.system.event_loop import EventLoop, wait_until_done
from paged_sdk.system.owner import Owner
from paged_sdk.system.threads import in_context, thread_must_start

__all__ = ["HelperThreads"]

_T = TypeVar("_T")
_Work: TypeAlias = SimpleQueue[Callable[[], None] | None]

IDLE_SECONDS: Final = 10.0
"""How long a thread may be idle before it ends; anyio and trio have the same limit."""


class HelperThreads:
    """Runs functions for one event loop in a pool of threads.

    Starting a thread per function would cost a request 0.04 ms, and 2 to 4 ms while a model computes: the event loop
    waits until the new thread runs.

    anyio's threads do not suit: the application may have all of its 40 waiting for the very functions to run here. And
    with asyncio they live until the loop's main task ends: if the loop is stopped instead, they never end, nor does the
    program. These threads end with this object at the latest. The program's exit does not wait for them, except for a
    function in progress, since interrupting native code can crash the process.

    :param most: the limit of functions at a time, including those whose callers were cancelled
    """

    def __init__(self, most: int) -> None:
        self._limiter = anyio.CapacityLimiter(most)
        self._idle: dict[_Work, _Helper] = {}  # by queue, in the order in which they became idle

    async def run(self, function: Callable[[], _T], purpose: str) -> _T:
        """Run a function in a helper thread and return its result. A cancelled caller does not wait for the function.

        :param function: must return within bounded time
        :param purpose: what the thread is for: see :func:`~paged_sdk.system.threads.thread_must_start`
        :raises EngineError: the system refuses to start another thread
        """
        borrower = object()
        await self._limiter.acquire_on_behalf_of(borrower)
        try:
            with thread_must_start(purpose):
                helper = self._take()
        except BaseException:
            self._limiter.release_on_behalf_of(borrower)
            raise
        run, future = in_context(function)
        try:
            loop, done = EventLoop(), partial(self._note_end, helper, borrower)
            future.add_done_callback(lambda _: loop.call_soon(done))
            helper.do(run)
            del run, helper
            await wait_until_done(future)
            with thread_must_start(purpose):  # the function may start threads, too
                return future.result()
        finally:
            del future  # an error's traceback holds this frame, and the future holds the error

    def take_off(self, work: _Work) -> bool:
        """Remove the thread that reads this queue from the idle threads, from any thread; False if it is not idle."""
        return self._idle.pop(work, None) is not None

    def _take(self) -> _Helper:
        try:
            return self._idle.popitem()[1]
        except KeyError:
            return _Helper(weakref.ref(self))

    def _note_end(self, helper: _Helper, borrower: object) -> None:
        self._idle[helper.work] = helper
        self._limiter.release_on_behalf_of(borrower)


class _Helper:
    """Runs functions in a thread, one at a time. The thread ends when this object is dropped, or after it was idle for
    long.

    :param threads: the pool that the thread belongs to
    :ivar work: the queue that the thread reads
    """

    def __init__(self, threads: weakref.ref[HelperThreads]) -> None:
        self.work: _Work = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        thread = threading.Thread(
            target=_serve, args=(self.work, self._idle, threads), name="paged-sdk helper", daemon=True
        )
        thread.start()
        weakref.finalize(self, self.work.put, None)
        weakref.finalize(thread, _wait, Owner(), self._idle)  # at exit: wait for a running function

    def do(self, run: Callable[[], None]) -> None:
        """Start a function, which must not raise. The helper must be idle."""
        self._idle.clear()
        self.work.put(run)


def _serve(work: _Work, idle: threading.Event, threads: weakref.ref[HelperThreads]) -> None:
    while True:
        try:
            run = work.get(timeout=IDLE_SECONDS)
        except Empty:
            if (whose := threads()) is None or whose.take_off(work):
                return
            del whose
            continue
        if run is None:
            return
        try:
            run()
        finally:
            idle.set()
        del run  # may hold the last reference to the helper


def _wait(owner: Owner, idle: threading.Event) -> None:
    if owner.is_here:  # in a forked child the thread does not exist
        idle.wait()

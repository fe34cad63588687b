"""Keep threads that run what would hold up an event loop."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, TypeAlias, TypeVar

import anyio

from paged_sdk.system.event_loop import EventLoop, settled
from paged_sdk.system.owner import Owner
from paged_sdk.system.threads import in_context, thread_must_start

__all__ = ["HelperThreads"]

_T = TypeVar("_T")
_Work: TypeAlias = SimpleQueue[Callable[[], None] | None]

IDLE_SECONDS: Final = 10.0
"""A thread that has had nothing to do for so long ends, as anyio's and trio's do."""


class HelperThreads:
    """Runs functions for one event loop, whose object this is, in threads that wait for the next one.

    A thread for each would cost a request 0.04 ms, and 2 to 4 ms beside a model that computes: so long the event loop
    waits until a new thread has begun.

    anyio's threads are not for that. All 40 that an application has may be waiting for what is to be run. And with
    asyncio they wait until the loop's main task ends: where the loop is stopped instead, they never end, and neither
    does the program. These end with this object at the latest. The end of the program does not wait for them, only for
    a function that one of them is running: native code that is cut off can take the process down.

    :param most: so many functions run at a time, those that nobody waits for any more included
    """

    def __init__(self, most: int) -> None:
        self._limiter = anyio.CapacityLimiter(most)
        self._idle: dict[_Work, _Helper] = {}  # in the order in which they became so

    async def run(self, function: Callable[[], _T], purpose: str) -> _T:
        """Return what a function returns, which has an end. Whoever is cancelled does not wait for it.

        :param purpose: what the thread is for
        :raises EngineError: the system gives this process no more threads
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
            await settled(future)
            with thread_must_start(purpose):  # the function may start some, too
                return future.result()
        finally:
            del future  # an error's traceback holds this frame, and the future holds the error

    def take_off(self, work: _Work) -> bool:
        """Give nothing more to the thread that waits for work there, if it is idle; from any thread."""
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
    """Is a thread that runs what it is given. It ends when nobody holds this object any more, or after having been idle
    for long.

    :param threads: whose it is
    :ivar work: where it waits for what to do
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
        weakref.finalize(thread, _wait, Owner(), self._idle)  # at the end of the program; after the thread's own: none

    def do(self, run: Callable[[], None]) -> None:
        """Have it run a function that raises nothing, and is the only one until it has ended."""
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
        del run  # it may be what has held the helper


def _wait(owner: Owner, idle: threading.Event) -> None:
    if owner.is_here:  # in a forked child the thread does not exist
        idle.wait()

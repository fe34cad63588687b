"""Run functions in threads, and say with a typed error that the system gives a process no more of them."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from paged_sdk.errors import EngineError
from paged_sdk.system.event_loop import EventLoop, settled

__all__ = ["in_anyio_thread", "in_context", "in_own_thread", "thread_must_start"]

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


async def in_own_thread(
    function: Callable[[], _T], purpose: str, *, abandon_on_cancel: bool = True, daemon: bool | None = None
) -> _T:
    """Run a function in a thread that ends with it, and is none of anyio's: see
    :class:`~paged_sdk.system.helper_threads.HelperThreads`, which is for what is done often.

    :param purpose: what the thread is for
    :param abandon_on_cancel: whoever is cancelled does not wait for its end
    :param daemon: the end of the program does not wait for it: for what may take for ever, and only waits. Native code
        that is cut off can take the process down. None: as the event loop's thread
    :raises EngineError: the system gives this process no more threads
    """
    await anyio.lowlevel.checkpoint()
    run, future = in_context(function)
    try:
        with thread_must_start(purpose):
            _start(run, daemon)
            del run
            await (settled(future) if abandon_on_cancel else _surely_settled(future))
            return future.result()
    finally:
        del future  # an error's traceback holds this frame, and the future holds the error


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


def _start(run: Callable[[], None], daemon: bool | None) -> None:
    try:
        threading.Thread(target=run, name="paged-sdk call", daemon=daemon).start()
    except RuntimeError as error:
        if "interpreter shutdown" not in str(error):
            raise
        # Python 3.12 starts no thread once the main one has ended, when a forgotten model is still to be closed. The
        # event loop has nothing else to do then.
        run()


def in_context(function: Callable[[], _T]) -> tuple[Callable[[], None], Future[_T]]:
    """Return what another thread is to call so as to run a function with a copy of this one's context variables, and
    the future of what the function returns or raises.
    """
    context = contextvars.copy_context()
    sniffio = sys.modules.get("sniffio")  # trio brings it, and anyio uses it if it is there
    if sniffio is not None:  # the other thread does not run in an event loop
        context.run(sniffio.current_async_library_cvar.set, None)
    future: Future[_T] = Future()
    return partial(context.run, _settle, future, function), future


def _settle(future: Future[_T], function: Callable[[], _T]) -> None:
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
        del future  # an error's traceback holds this frame
    else:
        future.set_result(result)


async def _surely_settled(future: Future[Any]) -> None:
    """Wait until a future is settled, and only then be cancelled."""
    cancellation: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await settled(future)
            except anyio.get_cancelled_exc_class() as error:  # by asyncio itself, from which no scope is a shield
                cancellation = error
    try:
        if cancellation is not None:
            raise cancellation
    finally:
        del cancellation


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

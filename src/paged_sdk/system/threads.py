"""Run functions in threads, with a typed error if a thread cannot be started."""

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
from paged_sdk.system.event_loop import EventLoop, wait_until_done

__all__ = ["in_anyio_thread", "in_context", "in_own_thread", "thread_must_start"]

_T = TypeVar("_T")


@contextmanager
def thread_must_start(purpose: str) -> Iterator[None]:
    """Turn the failure to start a thread in the block into a typed error.

    :param purpose: what the thread is for, as the message continues after "no thread", such as "to send output in"
    :raises EngineError: the system refuses to start another thread
    """
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):  # Python has no exception class of its own for it
            raise
        raise EngineError(f"no thread {purpose}: the system gives this process no more ({error})") from error


async def in_own_thread(
    function: Callable[[], _T], purpose: str, *, abandon_on_cancel: bool = True, daemon: bool | None = None
) -> _T:
    """Run a function in a new thread, which ends with the function. For frequent calls, and for why anyio's threads are
    not used, see :class:`~paged_sdk.system.helper_threads.HelperThreads`.

    :param purpose: what the thread is for: see :func:`thread_must_start`
    :param abandon_on_cancel: whether a cancelled caller returns without waiting for the function
    :param daemon: whether the program can exit during the function: only for functions that do nothing but wait,
        perhaps for ever, since interrupting native code can crash the process. None: like the event loop's thread
    :raises EngineError: the system refuses to start another thread
    """
    await anyio.lowlevel.checkpoint()
    run, future = in_context(function)
    try:
        with thread_must_start(purpose):
            _start(run, daemon)
            del run
            await (wait_until_done(future) if abandon_on_cancel else _shielded_wait(future))
            return future.result()
    finally:
        del future  # an error's traceback holds this frame, and the future holds the error


async def in_anyio_thread(function: Callable[[], _T], purpose: str) -> _T:
    """Run a function of the application in one of anyio's threads, so that :mod:`anyio.from_thread` finds the event
    loop. The thread does not count towards anyio's limit of 40, and ends with the function if anyio's internals allow
    it.

    :param purpose: what the thread is for: see :func:`thread_must_start`
    :raises EngineError: the system refuses to start another thread
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
        # From Python 3.12 on, no thread can be started once the main thread has ended, but an unclosed model may still
        # have to be closed. The event loop has nothing else to do then.
        run()


def in_context(function: Callable[[], _T]) -> tuple[Callable[[], None], Future[_T]]:
    """Return a callable for another thread, which runs a function with a copy of this thread's context variables, and
    the future of the function's result.
    """
    context = contextvars.copy_context()
    sniffio = sys.modules.get("sniffio")  # a dependency of trio, which anyio uses if it is loaded
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


async def _shielded_wait(future: Future[Any]) -> None:
    """Wait until a future is done, and deliver a cancellation only then."""
    cancellation: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await wait_until_done(future)
            except anyio.get_cancelled_exc_class() as error:  # asyncio's own, against which scopes do not shield
                cancellation = error
    try:
        if cancellation is not None:
            raise cancellation
    finally:
        del cancellation


def _end_worker(loop: EventLoop) -> None:
    """End this thread after its current function, if it is one of anyio's workers on asyncio. Otherwise it would wait
    for more work, and if the event loop is stopped, the program would wait for the thread. anyio ends idle workers in
    the same way, but has no public function for it.
    """
    thread: Any = threading.current_thread()
    stop, root_task = getattr(thread, "stop", None), getattr(thread, "root_task", None)
    if stop is not None and root_task is not None:
        loop.call_soon(partial(root_task.remove_done_callback, stop))
        stop()

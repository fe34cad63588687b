"""Runs a model in an event loop of its own thread, for synchronous code."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import ParamSpec, Self, TypeAlias, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from paged_sdk.errors import ConfigError, EngineError
from paged_sdk.model import Model
from paged_sdk.system.owner import OfOneProcess, Owner, closed_model
from paged_sdk.system.threads import thread_must_start

__all__ = ["BlockingLoop"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Ended: TypeAlias = SystemExit | KeyboardInterrupt


class BlockingLoop(OfOneProcess):
    """Runs a model in an event loop of its own thread; other threads wait for what it does there.

    :param building: anything that gives a model when awaited
    :raises ConfigError: it cannot be awaited
    :raises PagedError: as for building the model
    """

    def __init__(self, building: Awaitable[Model]) -> None:
        self._owner = Owner()
        self._portal, thread = _start_portal()
        try:
            self._model = _run(self._portal, partial(_await, building))
        except BaseException:
            _stop_portal(self._portal, thread)
            raise
        self._calls_this: ContextVar[bool] = ContextVar("calls_this", default=False)
        # Runs at close(), at garbage collection or at interpreter exit, whichever comes first, and once.
        self._finalizer = weakref.finalize(
            self, _close, self._owner, self._portal, thread, self._model, self._calls_this
        )

    def close(self) -> None:
        """Close the model as :meth:`Model.aclose` does, and end the event loop's thread. Idempotent.

        It may be called from a tool that the model has called; the thread then ends after the tool.
        """
        if self._finalizer.alive:
            self._check_thread()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, function: Callable[_P, Awaitable[_T]], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a method that waits for the engine."""
        self._check_thread()
        return self._run(function, *args, **kwargs)

    def _check_thread(self) -> None:
        if _is_engine_thread(self._model):
            raise EngineError("the engine's own thread, on which logits processors run, cannot wait for the engine")

    def _run(self, function: Callable[_P, Awaitable[_T]], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self._owner.check()
        if not self._finalizer.alive:
            raise closed_model()
        return _run(self._portal, partial(_marked, self._calls_this, partial(function, *args, **kwargs)))


def _run(portal: BlockingPortal, function: Callable[[], Awaitable[_T]]) -> _T:
    """Run a function as a task of the portal, and wait for its result."""
    future: Future[_T | _Ended] = portal.start_task_soon(_caught, function)
    try:
        result = future.result()
    except BaseException:
        # Ctrl-C while waiting: the result is not needed, so cancel the task. This has no effect if the task has ended.
        future.cancel()
        raise
    if isinstance(result, _Ended):
        raise result
    return result


async def _caught(function: Callable[[], Awaitable[_T]]) -> _T | _Ended:
    try:
        return await function()
    except (SystemExit, KeyboardInterrupt) as ended:  # raised in the caller's thread: here it would end the event loop
        return ended


async def _marked(calls_this: ContextVar[bool], function: Callable[[], Awaitable[_T]]) -> _T:
    """Run a function, and mark its context, which helper threads inherit, as part of a call of the model."""
    calls_this.set(True)
    return await function()


async def _await(building: Awaitable[Model]) -> Model:
    if not isinstance(building, Awaitable):
        raise ConfigError.of("building", building, "a builder's build(), such as TextModelBuilder(...).build()")
    return await building


def _start_portal() -> tuple[BlockingPortal, threading.Thread]:
    """Start an event loop in a daemon thread. anyio's own portal thread would keep an interpreter from exiting if a
    model was not closed.
    """
    started: Future[BlockingPortal] = Future()

    async def serve() -> None:
        async with BlockingPortal() as portal:
            if started.set_running_or_notify_cancel():
                started.set_result(portal)
                await portal.sleep_until_stopped()

    thread = threading.Thread(target=anyio.run, args=(serve,), name="paged-sdk-portal", daemon=True)
    with thread_must_start("for the model's event loop"):
        thread.start()
    try:
        while True:
            try:
                return started.result(timeout=1), thread
            except FutureTimeoutError:
                if not thread.is_alive():  # it ended before it could report, out of memory or file descriptors
                    raise EngineError("the thread of the model's event loop ended while starting") from None
    except BaseException:
        if not started.cancel():  # Ctrl-C while waiting, but the portal has started
            _stop_portal(started.result(), thread)
        raise


def _stop_portal(portal: BlockingPortal, thread: threading.Thread) -> None:
    portal.call(portal.stop)
    thread.join()


def _close(
    owner: Owner, portal: BlockingPortal, thread: threading.Thread, model: Model, calls_this: ContextVar[bool]
) -> None:
    if not owner.is_here:  # in a forked child, the portal's thread does not exist
        return
    # If the garbage collector runs this on one of the threads to end, that thread cannot wait for itself.
    if threading.current_thread() is thread or _is_engine_thread(model):
        threading.Thread(target=_close, args=(owner, portal, thread, model, calls_this), daemon=True).start()
        return
    try:
        portal.call(model.aclose)
    finally:
        if calls_this.get():  # called from a tool: the portal's thread waits for this thread
            portal.call(portal.stop)
        else:
            _stop_portal(portal, thread)


def _is_engine_thread(model: Model) -> bool:
    return model._insides.worker.is_this_thread

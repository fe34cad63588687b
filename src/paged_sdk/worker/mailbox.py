"""Carry commands from other threads to the worker thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias

from attrs import frozen

from paged_sdk.engine.engine import Engine
from paged_sdk.scheduler.request import Request
from paged_sdk.worker.subscription import Subscriber

__all__ = ["Abort", "Call", "CallAlone", "Close", "Command", "Mailbox", "Submit", "Wake"]

_LOOK_SECONDS: Final = 1.0


@frozen
class Submit:
    """Tells the worker to queue a request; its output or error goes to the subscription."""

    request: Request
    subscription: Subscriber


@frozen
class Abort:
    """Tells the worker to end a request."""

    request_id: str


@frozen
class Call:
    """Tells the worker to run a function on the engine between two steps."""

    function: Callable[[Engine], Any]
    future: Future[Any]


@frozen
class CallAlone:
    """Tells the worker to run a function on the engine when it has no requests; later requests wait until it has
    returned.

    :ivar function: receives the engine, and a function that raises once the engine is being closed
    :ivar future: if it is cancelled before its turn, the function is not run
    """

    function: Callable[[Engine, Callable[[], None]], Any]
    future: Future[Any]


@frozen
class Close:
    """Tells the worker to stop: when all requests have ended (``drain``), or at once.

    :ivar drain: finish earlier requests first; False: cancel them
    """

    drain: bool


@frozen
class Wake:
    """Tells the worker that something that waiting requests need, such as an encoded image, is ready."""


Command: TypeAlias = Submit | Abort | Call | CallAlone | Close | Wake


class Mailbox:
    """Holds commands in the order of their arrival.

    ``put`` may be called from any thread and from finalizers: ``SimpleQueue.put`` is reentrant, whereas a lock could be
    held by the very thread that the garbage collector interrupted.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command] = SimpleQueue()

    def put(self, command: Command) -> None:
        self._queue.put(command)

    def wait(self, *, is_stalled: bool) -> Command:
        """Wait for the next command and return it.

        :param is_stalled: whether requests wait for inputs, which may be given up without a command: then a
            :class:`Wake` is returned after a second
        """
        try:
            return self._queue.get(timeout=_LOOK_SECONDS if is_stalled else None)
        except Empty:
            return Wake()

    def drain(self) -> Iterator[Command]:
        """Yield the commands that have arrived, without waiting."""
        while True:
            try:
                yield self._queue.get_nowait()
            except Empty:
                return

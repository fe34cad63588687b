"""Carry commands from other threads to the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from attrs import frozen

from paged_sdk.engine.engine import Engine
from paged_sdk.scheduler.request import Request
from paged_sdk.worker.subscription import Subscriber

__all__ = ["Abort", "Call", "CallAlone", "Close", "Command", "Mailbox", "Submit", "Wake"]


@frozen
class Submit:
    """Asks to queue a request; its outcome goes to the subscription."""

    request: Request
    subscription: Subscriber


@frozen
class Abort:
    """Asks to end a request, whoever reads it."""

    request_id: str


@frozen
class Call:
    """Asks to run a function on the engine, between two steps."""

    function: Callable[[Engine], Any]
    future: Future[Any]


@frozen
class CallAlone:
    """Asks to run a function on the engine when it has no requests; those that come later wait until it is done.

    :ivar function: gets the engine, and what raises once nobody waits for its end any more
    :ivar future: the function is not run if this was cancelled before its turn
    """

    function: Callable[[Engine, Callable[[], None]], Any]
    future: Future[Any]


@frozen
class Close:
    """Asks to stop: when all requests have ended (``drain``), or at once.

    :ivar drain: finish what was submitted before; False cancels it
    """

    drain: bool


@frozen
class Wake:
    """Says that something has come which the engine's requests wait for."""


Command: TypeAlias = Submit | Abort | Call | CallAlone | Close | Wake


class Mailbox:
    """Holds commands in the order of their arrival.

    ``put`` may be called from any thread and from finalizers: ``SimpleQueue.put`` is reentrant, where a lock could
    be held by the very thread that the garbage collector interrupted.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command] = SimpleQueue()

    def put(self, command: Command) -> None:
        self._queue.put(command)

    def wait(self) -> Command:
        """Wait for the next command, and take it out."""
        return self._queue.get()

    def drain(self) -> Iterator[Command]:
        """Take out the commands that are there now."""
        while True:
            try:
                yield self._queue.get_nowait()
            except Empty:
                return

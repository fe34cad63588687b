"""Decide what an engine is sent before it goes on, however busy the machine is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any, Final

from paged_sdk import Model
from paged_sdk.worker.mailbox import Call

__all__ = ["Step", "gather", "num_unheard", "obeyed", "wait_for_requests"]

_MOST_SECONDS: Final = 60


def wait_for_requests(model: Model, number: int) -> None:
    """Have the engine take no step before it is sent so many requests, or whatever else is asked of it, from now on.
    This says it and returns at once, so it serves every event loop, and requests that are sent in one call.
    """
    worker: Any = model._worker
    future: Future[None] = Future()

    def wait(_: object) -> None:
        deadline = time.monotonic() + _MOST_SECONDS
        while worker._mailbox._queue.qsize() < number and time.monotonic() < deadline:
            time.sleep(0.001)

    worker._mailbox.put(Call(wait, future))


async def gather(model: Model, *requests: Awaitable[Any], return_exceptions: bool = False) -> list[Any]:
    """Send requests and return their results, as :func:`asyncio.gather` does, but let the engine take no step before it
    has each of them. Without that, how many of them its first steps have depends on how fast their tasks get a turn.
    """
    wait_for_requests(model, len(requests))
    return await asyncio.gather(*requests, return_exceptions=return_exceptions)


def num_unheard(model: Model) -> int:
    """Return how much was asked of the engine that it has not taken yet."""
    worker: Any = model._worker
    count: int = worker._mailbox._queue.qsize()
    return count


async def obeyed(model: Model) -> None:
    """Wait until the engine has done all that was asked of it before, and the model's stats say so."""
    worker: Any = model._worker
    await worker.call(lambda engine: None)


class Step:
    """Stands for one of an engine's next steps, which is kept from its end until a test says so.

    What the step has made comes to those who wait for it afterwards.

    :param number: which one of them it is, from 1
    :ivar is_done: set when all is done but to end it
    :ivar may_end: what the test sets
    """

    def __init__(self, model: Model, number: int = 1) -> None:
        self.is_done, self.may_end = threading.Event(), threading.Event()
        worker: Any = model._worker
        step = worker._step

        def held() -> None:
            nonlocal number
            number -= 1
            if number:
                step()
                return
            worker._step = step
            step()
            self.is_done.set()
            self.may_end.wait(_MOST_SECONDS)

        worker._step = held

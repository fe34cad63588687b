"""Let requests come together, however busy the machine is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import Any, Final

from paged_sdk import Model

__all__ = ["gather"]

_MOST_SECONDS: Final = 60


async def gather(model: Model, *requests: Awaitable[Any], return_exceptions: bool = False) -> list[Any]:
    """Send requests and return their results, as :func:`asyncio.gather` does, but let the engine take no step before it
    has each of them. Without that, how many of them its first steps have depends on how fast their tasks get a turn.
    """
    worker: Any = model._worker
    holds, go = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        holds.set()
        go.wait(_MOST_SECONDS)

    holding = asyncio.ensure_future(worker.call(hold))
    while not holds.is_set():
        await asyncio.sleep(0.001)
    asked = [asyncio.ensure_future(each) for each in requests]
    while worker._mailbox._queue.qsize() < len(asked) and not any(each.done() for each in asked):
        await asyncio.sleep(0.001)
    go.set()
    await holding
    return await asyncio.gather(*asked, return_exceptions=return_exceptions)

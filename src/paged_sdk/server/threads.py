"""Run what would hold up the event loop for milliseconds in threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

__all__ = ["in_thread"]

T = TypeVar("T")

MOST_THREADS: Final = 40
"""In one event loop so many run at a time, beside as many that anyio gives an application."""
# They belong to the event loop, as anyio's own do.
_limiter: Final[RunVar[anyio.CapacityLimiter]] = RunVar("paged_sdk.server.threads")


async def in_thread(function: Callable[[], T]) -> T:
    """Run a function in a thread that is none of the application's 40: all of these may be waiting for an answer of
    this server, where it is part of an application.
    """
    limiter = _limiter.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(MOST_THREADS)
        _limiter.set(limiter)
    return await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=limiter)

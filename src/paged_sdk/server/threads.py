"""Runs functions that would block the event loop for milliseconds in threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

__all__ = ["in_thread"]

T = TypeVar("T")

MOST_THREADS: Final = 40
"""Threads at a time per event loop, in addition to anyio's own 40, which the application uses."""
# Per event loop, as anyio's default limiter.
_limiter: Final[RunVar[anyio.CapacityLimiter]] = RunVar("paged_sdk.server.threads")


async def in_thread(function: Callable[[], T]) -> T:
    """Run a function in a thread that does not count towards anyio's default limit of 40. If the server is mounted in
    an application, all of those threads may be waiting for answers of this server.
    """
    limiter = _limiter.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(MOST_THREADS)
        _limiter.set(limiter)
    return await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=limiter)

"""A running event loop, reachable from any thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio.lowlevel

__all__ = ["EventLoop"]


class EventLoop:
    """The asyncio loop or trio run of the calling task. Two handles of one loop are equal."""

    def __init__(self) -> None:
        token: Any = anyio.lowlevel.current_token().native_token
        self._token = token
        # asyncio names it one way, trio the other; neither waits for the loop.
        self._post = token.call_soon_threadsafe if hasattr(token, "call_soon_threadsafe") else token.run_sync_soon

    def call_soon(self, callback: Callable[[], object]) -> bool:
        """Have the loop run ``callback``, from any thread and without waiting; False if the loop has ended."""
        try:
            self._post(callback)
        except RuntimeError:  # "Event loop is closed"; trio.RunFinishedError is one too
            return False
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EventLoop) and self._token is other._token

    def __hash__(self) -> int:
        return id(self._token)

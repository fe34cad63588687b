"""Pass parcels from a thread to a stream, with backpressure."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

from paged_sdk.remote.link import Parcel

__all__ = ["Outgoing"]

MAX_WAITING: Final = 2
"""Parcels that may wait: one is being sent, and the next is ready when that is done."""


class Outgoing:
    """Holds the parcels that wait to be sent, in the event loop that it was created in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parcels: deque[Parcel] = deque()
        self._news = asyncio.Event()
        self._room = threading.Semaphore(MAX_WAITING)
        self._has_ended = False
        self._is_closed = False

    def put(self, parcel: Parcel) -> None:
        """Queue a parcel, and wait while the queue is full; to be called on one other thread.

        :raises BrokenPipeError: the stream was closed
        """
        copied = [bytes(part) for part in parcel]
        self._room.acquire()
        if self._is_closed:
            raise BrokenPipeError
        self._parcels.append(copied)
        self._loop.call_soon_threadsafe(self._news.set)

    def end(self) -> None:
        """End the iteration after the queued parcels; in the loop."""
        self._has_ended = True
        self._news.set()

    def end_with(self, parcel: Parcel) -> None:
        """Queue one last parcel, even if the queue is full, and end the iteration after it; in the loop."""
        self._parcels.append([bytes(part) for part in parcel])
        self.end()

    def close(self) -> None:
        """Refuse further parcels and end the iteration; in the loop."""
        self._is_closed = True
        self._room.release(MAX_WAITING)
        self.end()

    async def parcels(self) -> AsyncGenerator[list[Parcel]]:
        """Yield all queued parcels together, again and again; to be called once."""
        while not self._is_closed:
            await self._news.wait()
            self._news.clear()
            taken = [self._parcels.popleft() for _ in range(len(self._parcels))]
            if taken:
                self._room.release(len(taken))
                yield taken
            if self._has_ended:
                self._news.set()
                if not self._parcels:
                    return

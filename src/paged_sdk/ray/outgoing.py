"""Hand parcels over from a thread to a stream, no faster than the stream takes them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

from paged_sdk.remote.link import Parcel

__all__ = ["Outgoing"]

AHEAD: Final = 2
"""So many parcels may wait: one is being sent, and the next is there when that is done."""


class Outgoing:
    """Holds the parcels that wait to be sent, in the event loop that it was made in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parcels: deque[Parcel] = deque()
        self._news = asyncio.Event()
        self._room = threading.Semaphore(AHEAD)
        self._has_ended = False
        self._is_closed = False

    def put(self, parcel: Parcel) -> None:
        """Have a parcel sent, and wait until there is room for it; to be called on one other thread.

        :raises BrokenPipeError: nobody reads any more
        """
        copied = [bytes(part) for part in parcel]
        self._room.acquire()
        if self._is_closed:
            raise BrokenPipeError
        self._parcels.append(copied)
        self._loop.call_soon_threadsafe(self._news.set)

    def end(self) -> None:
        """Say that no parcel follows; in the loop."""
        self._has_ended = True
        self._news.set()

    def end_with(self, parcel: Parcel) -> None:
        """Say that one more parcel follows, whatever waits for room; in the loop."""
        self._parcels.append([bytes(part) for part in parcel])
        self.end()

    def close(self) -> None:
        """Take nothing any more, and end the iteration; in the loop."""
        self._is_closed = True
        self._room.release(AHEAD)
        self.end()

    async def parcels(self) -> AsyncGenerator[list[Parcel]]:
        """Yield the parcels, those that wait together; to be called once."""
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

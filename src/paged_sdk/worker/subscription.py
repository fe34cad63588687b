"""One request's events on their way from the worker thread to one task."""

from __future__ import annotations

from collections import deque

import anyio

from paged_sdk.engine.events import RequestEvent
from paged_sdk.worker.event_loop import EventLoop

__all__ = ["Subscription"]


class Subscription:
    """The worker posts, one task of the loop it was made in receives. Posting never waits for the reader.

    ``post`` may be called from any thread, ``notify`` on the loop's thread only: so ``receive`` needs no lock, since
    between its look at the queue and its wait nothing else runs on that loop.
    """

    def __init__(self) -> None:
        self.loop = EventLoop()
        self._events: deque[RequestEvent] = deque()
        self._ready = anyio.Event()

    def post(self, event: RequestEvent) -> None:
        self._events.append(event)

    def notify(self) -> None:
        self._ready.set()

    async def receive(self) -> RequestEvent:
        """Everything since the last call, merged into one event; waits for the first."""
        while not self._events:
            self._ready = anyio.Event()
            await self._ready.wait()
        events = []
        while self._events:
            events.append(self._events.popleft())
        return RequestEvent.merge(events)

"""Represent the listeners of one event loop to the worker thread."""

from __future__ import annotations

from paged_sdk.engine.events import Outbox
from paged_sdk.worker.event_loop import EventLoop
from paged_sdk.worker.subscription import Subscription

__all__ = ["LoopListeners"]


class LoopListeners:
    """Gathers the subscriptions made in one event loop, and the events to post to them.

    :ivar subscriptions: the subscriptions of the requests that have not ended, by id
    """

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self.outbox = Outbox()
        self.subscriptions: dict[str, Subscription] = {}

    def post(self) -> bool:
        """Hand the outbox over to the loop, with one wake-up; False if the loop has ended."""
        batch = self.outbox.take()
        for _, event in batch.events:
            if event.is_last:
                del self.subscriptions[event.request_id]
        return self.loop.call_soon(batch.deliver)

"""Passes the output of requests to the event loops that read it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from paged_sdk.engine.events import Outbox, RequestEvent
from paged_sdk.errors import PagedError
from paged_sdk.guard import request_failure
from paged_sdk.system.event_loop import OutputLoop
from paged_sdk.worker.subscription import Subscriber

__all__ = ["OutputLoops", "end_with_error"]


class OutputLoops:
    """Holds the subscriptions of all live requests by event loop, and passes them their output, with one wake-up per
    loop and step. The requests of a loop that has ended, or cannot be called, are aborted: they have no reader.

    :param abort: ends a request in the engine
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._listeners: dict[OutputLoop, _LoopListeners] = {}

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def outbox(self, loop: OutputLoop) -> Outbox:
        """Return where the output for a loop is collected until :meth:`publish`."""
        return self._of(loop).outbox

    def add(self, request_id: str, subscription: Subscriber) -> None:
        """Add the subscription of a request whose output goes to its loop's outbox."""
        self._of(subscription.loop).subscriptions[request_id] = subscription

    def publish(self) -> bool:
        """Post the new output, and wake each event loop once; return whether there was any."""
        has_some = False
        for listeners in list(self._listeners.values()):
            has_some = has_some or bool(listeners.outbox)
            try:
                is_open = not listeners.outbox or listeners.post()
            except Exception as error:  # unknown how much of it the loop has received
                self._fail(listeners, error)
            else:
                if not is_open:  # the loop ended without closing its requests
                    self._abort_all(listeners)
                    listeners.subscriptions.clear()
            if not listeners.subscriptions:
                del self._listeners[listeners.loop]
        return has_some

    def abort_all(self) -> None:
        """Abort all live requests; their last output is still to be published."""
        for listeners in self._listeners.values():
            self._abort_all(listeners)

    def end_all(self, make_error: Callable[[], PagedError]) -> None:
        """End all live requests with errors, when there is no engine any more."""
        for listeners in list(self._listeners.values()):
            for request_id, subscription in listeners.subscriptions.items():
                end_with_error(request_id, subscription, make_error())
        self._listeners.clear()

    def _of(self, loop: OutputLoop) -> _LoopListeners:
        return self._listeners.get(loop) or self._listeners.setdefault(loop, _LoopListeners(loop))

    def _abort_all(self, listeners: _LoopListeners) -> None:
        for request_id in listeners.subscriptions:
            self._abort(request_id)

    def _fail(self, listeners: _LoopListeners, error: Exception) -> None:
        """End the requests of one event loop with an error."""
        self._abort_all(listeners)
        listeners.outbox.take()
        subscriptions, listeners.subscriptions = listeners.subscriptions, {}
        for request_id, subscription in subscriptions.items():
            end_with_error(request_id, subscription, request_failure(error, request_id))


class _LoopListeners:
    """Holds the subscriptions of one event loop, and the output to post to them.

    :ivar subscriptions: the subscriptions of the requests that have not ended, by id
    """

    def __init__(self, loop: OutputLoop) -> None:
        self.loop = loop
        self.outbox = Outbox()
        self.subscriptions: dict[str, Subscriber] = {}

    def post(self) -> bool:
        """Pass the outbox to the loop, with one wake-up; return False if the loop has ended."""
        batch = self.outbox.take()
        is_open = self.loop.call_soon(batch.deliver)
        for _, event in batch.events:
            if event.is_last:
                self.subscriptions.pop(event.request_id, None)
        return is_open


def end_with_error(request_id: str, subscription: Subscriber, error: PagedError) -> None:
    """End a request that the engine does not hold, or no longer holds, with an error."""
    event = RequestEvent(request_id=request_id, error=error)
    for _ in range(2):  # retried if the loop raises, because without an answer the reader waits for ever
        with suppress(Exception):
            subscription.loop.call_soon(partial(subscription.add, event))
            return

"""Pins a prefix in several engines."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from paged_sdk.engine.events import RequestEvent
from paged_sdk.errors import PagedError
from paged_sdk.guard import request_failure
from paged_sdk.routing.replica import Replica
from paged_sdk.scheduler.request import Request
from paged_sdk.system.event_loop import OutputLoop
from paged_sdk.worker.subscription import Subscriber

__all__ = ["RoutedPin"]


class RoutedPin:
    """Has every engine compute and hold a prefix, those that join later too, so that it need not be computed wherever a
    request goes.

    The subscription hears that the prefix is held once each of the first engines has it or has refused it; and it gets
    an error only if none of them holds it. An engine that dies takes its share along; the last one takes the pin along,
    unless others are to come.

    All methods may be called from any thread. Finalizers may call :meth:`abort`, so no lock is held anywhere.

    :param outlives_engines: whether to wait for other engines when none is left
    :ivar request: the request, with the adapter of no engine in particular
    """

    def __init__(self, request: Request, subscription: Subscriber, *, outlives_engines: bool) -> None:
        self.request = request
        self.subscription = subscription
        self._outlives_engines = outlives_engines
        self._engines: dict[int, Replica] = {}
        self._unanswered: set[int] = set()
        self._is_answered = False
        self._is_aborted = False
        self._held: RequestEvent | None = None
        self._last: RequestEvent | None = None  # of the engine that left last, while there is none

    def begin(self, requests: Mapping[int, tuple[Replica, Request]]) -> None:
        """Submit the request to the first engines, by number.

        :param requests: each with the request that it gets
        :raises PagedError: none of them takes it; the last error
        """
        self._unanswered.update(requests)
        errors: list[PagedError] = []
        for number, (replica, request) in requests.items():
            try:
                self.join(number, replica, request)
            except PagedError as error:
                errors.append(error)
                self._unanswered.discard(number)
        if len(errors) == len(requests):
            raise errors[-1]

    def join(self, number: int, replica: Replica, request: Request) -> None:
        """Submit the request to an engine.

        :raises PagedError: it does not take it
        """
        self._engines[number] = replica
        try:
            replica.worker.submit(request, _Share(self, number))
        except BaseException:
            self._engines.pop(number, None)
            raise
        if self._is_aborted:  # abort() may have come while it was at no engine
            replica.worker.abort(request.request_id)

    def leave(self, number: int) -> None:
        """Release the share of an engine that gets no more requests."""
        replica = self._engines.get(number)
        if replica is not None:
            replica.worker.abort(self.request.request_id)

    def abort(self) -> None:
        """Release all shares."""
        self._is_aborted = True
        for replica in list(self._engines.values()):
            replica.worker.abort(self.request.request_id)
        last = self._last
        if last is not None and not self._engines:  # no engine will tell the subscription
            self.subscription.loop.call_soon(partial(self.subscription.add, last))

    # On the thread of the subscription's event loop

    def take(self, number: int, event: RequestEvent) -> None:
        """Take an event of a share: it is held, or has ended."""
        if event.is_last:
            self._engines.pop(number, None)
        elif event.start is not None:
            self._held = event
        self._unanswered.discard(number)
        if self._unanswered:
            return
        if not self._is_answered and self._held is not None:
            self._is_answered = True
            self.subscription.add(self._held)
        if event.is_last and not self._engines:
            self._last = event
            if self._is_aborted or not (self._is_answered and self._outlives_engines):
                self.subscription.add(event)


class _Share:
    """Receives the events of a pin in one engine (a :class:`~paged_sdk.worker.subscription.Subscriber`)."""

    __slots__ = ("_number", "_pin")

    def __init__(self, pin: RoutedPin, number: int) -> None:
        self._pin = pin
        self._number = number

    @property
    def loop(self) -> OutputLoop:
        return self._pin.subscription.loop

    def add_tokens(self, index: int, token_ids: list[int]) -> None:
        raise AssertionError("nothing is generated after a pinned prefix")

    def add(self, event: RequestEvent) -> None:
        self._pin.take(self._number, event)

    def fail(self, error: Exception) -> None:
        request_id = self._pin.request.request_id
        self.add(RequestEvent(request_id=request_id, error=request_failure(error, request_id)))

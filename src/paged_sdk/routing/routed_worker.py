"""Routes requests to several engines, behind the interface of one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from attrs import evolve

from paged_sdk.config.isq import IsqType
from paged_sdk.engine.events import RequestEvent
from paged_sdk.errors import EngineDeadError, ModelClosedError, PagedError, QueueFullError
from paged_sdk.guard import request_failure
from paged_sdk.routing.replica import Replica, left, past, summed
from paged_sdk.routing.routed_pin import RoutedPin
from paged_sdk.routing.router import Route, Router
from paged_sdk.routing.waiting_room import WaitingRoom
from paged_sdk.scheduler.request import Request
from paged_sdk.system.event_loop import OutputLoop
from paged_sdk.system.owner import closed_model
from paged_sdk.types.stats import ModelStats
from paged_sdk.worker.subscription import Subscriber

__all__ = ["RoutedWorker", "none_runs"]


class RoutedWorker:
    """Sends each request to one of several engines (an :class:`~paged_sdk.worker.engine_access.EngineAccess`).

    An engine that is dead, closed or full gets no request that another can take. If a request's engine dies before it
    has produced output, the request is sent to another; otherwise it ends with that engine's error.

    All methods may be called from any thread. Finalizers may call :meth:`abort`, even while the same thread holds the
    lock. So :meth:`abort` takes no lock, and the router learns of ended requests before it routes the next one.

    Engines can be added and removed (:meth:`add`, :meth:`remove`). Their numbers are never reused. With ``waiting``,
    requests that arrive while there is no engine wait for one, as do requests whose last engine died.

    :param block_size: tokens per block, the same in all engines
    :param waiting: holds requests while there is no engine; None: no engine will be added
    """

    def __init__(
        self, replicas: Sequence[Replica], block_size: int, *, waiting: WaitingRoom[_LiveRequest] | None = None
    ) -> None:
        self._replicas: Mapping[int, Replica] = dict(enumerate(replicas))  # replaced, never mutated
        self._last = replicas[-1]
        self._gone = ModelStats()
        self._waiting = waiting
        self._router = Router([each.num_blocks for each in replicas], block_size=block_size)
        self._lock = threading.Lock()
        self._live: dict[str, _LiveRequest] = {}
        self._pins: dict[str, RoutedPin] = {}
        self._ended: deque[tuple[Route, int]] = deque()
        self._is_closing = False

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Return the current engines."""
        return tuple(self._replicas.values())

    @property
    def last(self) -> Replica:
        """Return the engine that was added last, even if it is gone. Its adapters are those of the others."""
        return self._last

    @property
    def replica_stats(self) -> tuple[ModelStats, ...]:
        """Return each engine's statistics."""
        return tuple(each.worker.stats for each in self.replicas)

    @property
    def stats(self) -> ModelStats:
        """Return the sum of all engines' statistics; the speed-up by drafts is their mean. Counts of engines that are
        dead, closed or removed are included.
        """
        with self._lock:  # remove() moves an engine's counts to self._gone
            replicas, gone = self.replicas, self._gone
            every = [left(each) for each in replicas]
        stats = summed([*every, gone], speed_ups=every)
        return evolve(stats, waiting=stats.waiting + len(self._waiting)) if self._waiting else stats

    def check(self) -> None:
        """Raise the first engine's error if no engine accepts requests and requests may not wait for one."""
        if self._waiting is not None and self._waiting.is_open and not self._is_closing:
            self.check_process()
            return
        errors = [each.why_not for each in self.replicas]
        if not errors:
            raise closed_model() if self._is_closing else none_runs()
        if errors[0] is not None and all(errors):
            raise errors[0]

    def check_process(self) -> None:
        for each in (*self.replicas, self._last):
            each.worker.check_process()

    @property
    def is_this_thread(self) -> bool:
        """Tell whether the calling thread drives one of the engines."""
        return any(each.worker.is_this_thread for each in self.replicas)

    def add(self, replica: Replica) -> int:
        """Add an engine, and return its number."""
        with self._lock:
            number = self._router.open(replica.num_blocks)
            self._replicas = {**self._replicas, number: replica}
            self._last = replica
            waited = () if self._waiting is None else self._waiting.leave()
        for live in waited:
            live.resume_soon()
        for pin in list(self._pins.values()):
            with suppress(PagedError):  # requests that go there compute the prefix themselves
                pin.join(number, replica, self._translated(pin.request, replica))
        return number

    def remove(self, number: int) -> None:
        """Remove an engine: it gets no new requests, its running requests continue, and its pins are released. Unknown
        numbers are ignored.
        """
        with self._lock:
            replica = self._replicas.get(number)
            if replica is not None:
                self._router.close(number)
                self._replicas = {each: left for each, left in self._replicas.items() if each != number}
                self._gone = summed([self._gone, past(replica.worker.stats)])
            if self._waiting is not None and not self._has_any():
                self._waiting.begin()
        for pin in list(self._pins.values()):
            pin.leave(number)

    def submit(self, request: Request, subscription: Subscriber) -> None:
        """Submit a request to the engine that serves it soonest; its output goes to the subscription.

        :raises ModelClosedError: no engine accepts requests, and the first is closed
        :raises EngineDeadError: no engine accepts requests, and the first is dead
        :raises QueueFullError: too many requests wait for an engine
        """
        self.check()
        if request.is_pinned:
            self._pin(request, subscription)
            return
        live = _LiveRequest(self, request, subscription)
        self._live[request.request_id] = live
        try:
            if not self.submit_or_wait(live):
                self.check()
                raise closed_model()
        except BaseException:
            self.end(live)
            raise

    def abort(self, request_id: str) -> None:
        """End a request. Safe in finalizers; unknown ids are ignored."""
        pin = self._pins.pop(request_id, None)
        if pin is not None:
            pin.abort()
        live = self._live.get(request_id)
        if live is not None:
            live.is_aborted = True
            if self._waiting is not None:
                self._waiting.discard(request_id)
            if live.replica is not None:
                live.replica.worker.abort(request_id)
            self.end(live)

    async def reset_prefix_cache(self) -> None:
        """Reset the prefix cache of each engine that accepts requests, one after the other."""
        self.check()
        for each in self.replicas:
            if each.why_not is None:
                await each.worker.reset_prefix_cache()
        with self._lock:
            self._router.forget()

    async def requantize(self, isq: IsqType) -> None:
        """Requantize each engine that accepts requests, one after the other, while the others keep running."""
        self.check()
        for each in self.replicas:
            if each.why_not is None:
                await each.worker.requantize(isq)

    def close(self, *, drain: bool = False) -> None:
        self._is_closing = True
        if self._waiting is not None:
            for live in self._waiting.empty():
                live.fail_soon(closed_model())
        for request_id in list(self._pins):  # an engine elsewhere would wait for their end
            self.abort(request_id)
        for each in self.replicas:
            each.worker.close(drain=drain)

    def join(self, timeout: float | None = None) -> bool:
        have_ended = [each.worker.join(timeout) for each in self.replicas]
        return all(have_ended)

    def _pin(self, request: Request, subscription: Subscriber) -> None:
        """Submit a request to every engine that accepts requests.

        :raises PagedError: none takes it
        """
        with self._lock:
            replicas = {number: each for number, each in self._replicas.items() if each.why_not is None}
            for number in replicas:
                self._router.note(number, request.block_hashes)
        if not replicas:
            raise none_runs()
        pin = self._pins[request.request_id] = RoutedPin(
            request, subscription, outlives_engines=self._waiting is not None
        )
        try:
            pin.begin({number: (each, self._translated(request, each)) for number, each in replicas.items()})
        except BaseException:
            del self._pins[request.request_id]
            raise

    # Called by _LiveRequest

    def submit_or_wait(self, live: _LiveRequest) -> bool:
        """Submit a request to the best engine that it has not been at, or let it wait if there is no engine. Return
        False if neither is possible.

        :raises PagedError: an engine refuses this request alone
        """
        while not self.place(live):
            with self._lock:
                if self._waiting is None or not self._waiting.is_open or self._is_closing or live.is_aborted:
                    return False
                if not self._has_any():
                    # close() or abort() may have looked into the waiting room before the request was put there.
                    kept = self._waiting.put(live)
                    has_left = self._is_closing or live.is_aborted
                    return kept and not (has_left and self._waiting.discard(live.request.request_id))
                if live.tried.issuperset(self._router.open_replicas):
                    return False
        return True

    def _has_any(self) -> bool:
        """Tell whether any engine accepts requests."""
        return any(each.why_not is None for each in self.replicas)

    def place(self, live: _LiveRequest) -> bool:
        """Submit a request to the best engine that it has not been at; return False if no engine accepts it.

        :raises PagedError: an engine refuses this request alone, for example because its adapter was unloaded
        """
        request = live.request
        while not self._is_closing:
            with self._lock:
                while self._ended:
                    self._router.finished(*self._ended.popleft())
                route = self._router.route(
                    request.block_hashes if request.shares_prefix else (),
                    len(request.prompt_token_ids),
                    num_texts=request.num_choices if request.generates else 0,
                    avoid=live.tried,
                )
                if route is None:
                    return False
                replica = self._replicas[route.replica]
            live.begin(route, replica)
            try:
                replica.worker.submit(self._translated(request, replica), live)
            except (EngineDeadError, ModelClosedError):
                self.note_failure(live)
                continue
            if live.is_aborted:  # abort() came while the request was at no engine
                replica.worker.abort(request.request_id)
            return True
        return False

    def note_start(self, route: Route) -> None:
        """Tell the router that a request's prompt has been computed."""
        with self._lock:
            self._router.started(route)

    def note_failure(self, live: _LiveRequest) -> None:
        """Detach a request from its engine, and close the engine in the router if it accepts no requests at all."""
        replica, route = live.replica, live.take_back()
        if replica is not None and route is not None and replica.why_not is not None:
            with self._lock:
                self._router.close(route.replica)

    def end(self, live: _LiveRequest) -> None:
        """Forget a request that has ended."""
        self._live.pop(live.request.request_id, None)
        live.take_back()

    def note_end(self, route: Route, num_generated: int) -> None:
        """Record that a request has left its engine. Takes no lock: :meth:`place` tells the router."""
        self._ended.append((route, num_generated))

    def goes_elsewhere(self, live: _LiveRequest, error: Exception) -> bool:
        """Submit a request without output to another engine, if its own is dead, closed or full. Return False if the
        request has to end with the error.

        :raises PagedError: the other engine refuses this request alone
        """
        if self._is_closing or live.is_aborted:
            return False
        if not isinstance(error, EngineDeadError | ModelClosedError | QueueFullError):
            return False
        self.note_failure(live)
        return self.submit_or_wait(live)

    def _translated(self, request: Request, replica: Replica) -> Request:
        """Return the request with its adapter's number in an engine, since the numbers differ between engines."""
        if request.adapter is None:
            return request
        return evolve(request, adapter=replica.adapters.use(request.adapter.name))


def none_runs() -> EngineDeadError:
    """Return the error of a model without replicas."""
    return EngineDeadError("no replica is running")


class _LiveRequest:
    """Forwards a request's output from its engine to its subscription, and moves the request to another engine if
    necessary (a :class:`~paged_sdk.worker.subscription.Subscriber`).

    :ivar tried: numbers of the engines that the request has been at
    :ivar route: the router's decision for the current engine; None: at no engine
    :ivar replica: the current engine; None: at no engine
    :ivar is_aborted: whether the caller has aborted the request
    """

    def __init__(self, worker: RoutedWorker, request: Request, subscription: Subscriber) -> None:
        self.request = request
        self.tried: set[int] = set()
        self.route: Route | None = None
        self.replica: Replica | None = None
        self.is_aborted = False
        self._worker = worker
        self._subscription = subscription
        self._has_been_heard = False
        self._num_generated = 0

    @property
    def loop(self) -> OutputLoop:
        return self._subscription.loop

    def begin(self, route: Route, replica: Replica) -> None:
        """Record the engine that the request is submitted to."""
        self.route, self.replica = route, replica
        self.tried.add(route.replica)

    def take_back(self) -> Route | None:
        """Detach the request from its engine; return the route to it."""
        route, self.route, self.replica = self.route, None, None
        if route is not None:
            self._worker.note_end(route, self._num_generated)
        return route

    def add_tokens(self, index: int, token_ids: list[int]) -> None:
        self._has_been_heard = True
        self._num_generated += len(token_ids)
        self._subscription.add_tokens(index, token_ids)

    def add(self, event: RequestEvent) -> None:
        if event.error is not None and not self._has_been_heard:
            try:
                if self._worker.goes_elsewhere(self, event.error):
                    return
            except PagedError as error:
                event = evolve(event, error=request_failure(error, self.request.request_id))
        self._has_been_heard = True
        if event.start is not None and self.route is not None:
            self._worker.note_start(self.route)
        if event.is_last:
            self._worker.end(self)
        self._subscription.add(event)

    def fail(self, error: Exception) -> None:
        self._worker.end(self)
        self._subscription.fail(error)

    # Called from any thread while the request waits for an engine

    def resume_soon(self) -> None:
        """Submit the request again, on its event loop, because an engine was added."""
        self._call_soon(self._resume)

    def fail_soon(self, error: Exception) -> None:
        """End the request with an error, on its event loop."""
        self._call_soon(partial(self._end_waiting, error))

    def _call_soon(self, callback: Callable[[], object]) -> None:
        if not self.loop.call_soon(callback):  # the loop has ended: no reader is left
            self._worker.end(self)

    def _resume(self) -> None:
        try:
            if not (self.is_aborted or self._worker.submit_or_wait(self)):
                self._end_waiting(none_runs())
        except PagedError as error:
            self._end_waiting(error)

    def _end_waiting(self, error: Exception) -> None:
        self._worker.end(self)
        failure = request_failure(error, self.request.request_id)
        self._subscription.add(RequestEvent(request_id=self.request.request_id, error=failure))

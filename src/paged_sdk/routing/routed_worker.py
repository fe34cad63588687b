"""Take requests for several engines, each of which goes to one of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Final, TypeVar

from attrs import evolve, fields, frozen

from paged_sdk.engine.engine import Engine
from paged_sdk.engine.events import RequestEvent
from paged_sdk.errors import EngineDeadError, ModelClosedError, PagedError, QueueFullError
from paged_sdk.guard import request_failure
from paged_sdk.kv.block_hash import block_hashes
from paged_sdk.loaded_adapters import Adapters
from paged_sdk.routing.router import Route, Router
from paged_sdk.scheduler.request import Request
from paged_sdk.types.adapter import AdapterInfo, AdapterUse
from paged_sdk.types.stats import ModelStats
from paged_sdk.worker.engine_access import EngineAccess
from paged_sdk.worker.event_loop import EventLoop
from paged_sdk.worker.subscription import Subscriber

__all__ = ["Replica", "ReplicaAdapters", "RoutedWorker"]

_T = TypeVar("_T")

MOST_BLOCKS: Final = 1024
"""Of a prompt so many blocks are named, 32,768 tokens as a rule: on the event loop this takes a millisecond."""


@frozen(eq=False)
class Replica:
    """Is one of the engines.

    :ivar adapters: those that are loaded there
    :ivar num_blocks: how many blocks of prefixes it can hold
    """

    worker: EngineAccess
    adapters: Adapters
    num_blocks: int

    @property
    def why_not(self) -> PagedError | None:
        """Return what it refuses requests with; None: it takes them."""
        try:
            self.worker.check()
        except PagedError as error:
            return error
        return None


class RoutedWorker:
    """Sends each request to one of several engines (an :class:`~paged_sdk.worker.engine_access.EngineAccess`).

    An engine that is dead, closed or full gets no request that another can take. A request whose engine dies is sent
    to another if nothing of its output has been heard yet; otherwise it ends with that engine's error.

    May be used from any thread. Finalizers may call :meth:`abort`, amid a call of the same thread that holds the lock:
    so that one takes no lock, and what has ended is told to the router before the next request.

    :param block_size: tokens of a block, in all engines
    """

    def __init__(self, replicas: Sequence[Replica], block_size: int) -> None:
        self._replicas = tuple(replicas)
        self._block_size = block_size
        self._router = Router([each.num_blocks for each in replicas], block_size=block_size)
        self._lock = threading.Lock()
        self._live: dict[str, _LiveRequest] = {}
        self._ended: deque[tuple[Route, int]] = deque()
        self._is_closing = False

    @property
    def replica_stats(self) -> tuple[ModelStats, ...]:
        """Return the snapshot of each engine."""
        return tuple(each.worker.stats for each in self._replicas)

    @property
    def stats(self) -> ModelStats:
        """Return the sum of all snapshots; the speed-up by drafts is the mean."""
        every = self.replica_stats
        sums = {each.name: sum(getattr(stats, each.name) for stats in every) for each in fields(ModelStats)}
        return ModelStats(**sums | {"draft_speed_up": sums["draft_speed_up"] / len(every)})

    def check(self) -> None:
        """Raise if no engine takes requests: what the first of them refuses them with."""
        errors = [each.why_not for each in self._replicas]
        if errors[0] is not None and all(errors):
            raise errors[0]

    def check_process(self) -> None:
        self._replicas[0].worker.check_process()

    def submit(self, request: Request, subscription: Subscriber) -> None:
        """Queue a request with the engine that serves it soonest; its outcome arrives at the subscription.

        :raises ModelClosedError: no engine takes requests, and the first is closed
        :raises EngineDeadError: likewise, and it is dead
        """
        self.check()
        live = _LiveRequest(self, request, subscription)
        self._live[request.request_id] = live
        try:
            if not self.place(live):
                self.check()
                raise ModelClosedError("the model is being closed")
        except BaseException:
            self.end(live)
            raise

    def abort(self, request_id: str) -> None:
        """End a request. Safe in finalizers; unknown ids are ignored."""
        live = self._live.get(request_id)
        if live is not None:
            live.is_aborted = True
            route = live.route
            if route is not None:
                self._replicas[route.replica].worker.abort(request_id)
            self.end(live)

    async def call(self, function: Callable[[Engine], _T]) -> _T:
        """Run a function on each engine that takes requests, one after the other, and return the last one's result."""
        self.check()
        results = [await each.worker.call(function) for each in self._replicas if each.why_not is None]
        return results[-1]

    async def call_alone(self, function: Callable[[Engine, Callable[[], None]], _T]) -> _T:
        """Run a function on each engine that takes requests, one after the other; the others go on meanwhile."""
        self.check()
        results = [await each.worker.call_alone(function) for each in self._replicas if each.why_not is None]
        return results[-1]

    def forget_prefixes(self) -> None:
        """Take it that no engine holds a prefix any more."""
        with self._lock:
            self._router.forget()

    def close(self, *, drain: bool = False) -> None:
        self._is_closing = True
        for each in self._replicas:
            each.worker.close(drain=drain)

    def join(self, timeout: float | None = None) -> bool:
        have_ended = [each.worker.join(timeout) for each in self._replicas]
        return all(have_ended)

    # For the requests under way

    def place(self, live: _LiveRequest) -> bool:
        """Send a request to the best engine that has not had it yet; False if none takes it.

        :raises PagedError: an engine refuses it alone, such as for an adapter that is not there any more
        """
        request = live.request
        hashes = block_hashes(request.prompt_token_ids, self._block_size, request.cache_keys, most=MOST_BLOCKS)
        while not self._is_closing:
            with self._lock:
                while self._ended:
                    self._router.finished(*self._ended.popleft())
                route = self._router.route(
                    hashes if request.shares_prefix else (),
                    len(request.prompt_token_ids),
                    num_texts=request.num_choices if request.reading is None else 0,
                    avoid=live.tried,
                )
            if route is None:
                return False
            live.begin(route)
            replica = self._replicas[route.replica]
            try:
                replica.worker.submit(self._translated(request, replica), live)
            except (EngineDeadError, ModelClosedError):
                self.note_failure(live)
                continue
            if live.is_aborted:  # while it was between two engines
                replica.worker.abort(request.request_id)
            return True
        return False

    def note_start(self, route: Route) -> None:
        """Take it that a request's prompt is computed."""
        with self._lock:
            self._router.started(route)

    def note_failure(self, live: _LiveRequest) -> None:
        """Take a request back from the engine that it is at, and note if that one takes no more at all."""
        route = live.take_back()
        if route is not None and self._replicas[route.replica].why_not is not None:
            with self._lock:
                self._router.close(route.replica)

    def end(self, live: _LiveRequest) -> None:
        """Know a request no more."""
        self._live.pop(live.request.request_id, None)
        live.take_back()

    def note_end(self, route: Route, num_generated: int) -> None:
        """Take it that a request is at its engine no more."""
        self._ended.append((route, num_generated))

    def goes_elsewhere(self, live: _LiveRequest, error: Exception) -> bool:
        """Send a request of which nothing was heard to another engine, if its own cannot serve it; False if it stays
        with the error.

        :raises PagedError: the other engine refuses it alone
        """
        if self._is_closing or live.is_aborted:
            return False
        if not isinstance(error, EngineDeadError | ModelClosedError | QueueFullError):
            return False
        self.note_failure(live)
        return self.place(live)

    def _translated(self, request: Request, replica: Replica) -> Request:
        """Return the request with the adapter's number in another engine."""
        if request.adapter is None:
            return request
        return evolve(request, adapter=replica.adapters.use(request.adapter.name))


class _LiveRequest:
    """Passes on what an engine says of a request (a :class:`~paged_sdk.worker.subscription.Subscriber`).

    :ivar tried: the engines that have had it
    :ivar route: where it is
    :ivar is_aborted: whether nobody waits for it any more
    """

    def __init__(self, worker: RoutedWorker, request: Request, subscription: Subscriber) -> None:
        self.request = request
        self.tried: set[int] = set()
        self.route: Route | None = None
        self.is_aborted = False
        self._worker = worker
        self._subscription = subscription
        self._has_been_heard = False
        self._num_generated = 0

    @property
    def loop(self) -> EventLoop:
        return self._subscription.loop

    def begin(self, route: Route) -> None:
        """Be at another engine from now on."""
        self.route = route
        self.tried.add(route.replica)

    def take_back(self) -> Route | None:
        """Be at no engine any more; return where it was."""
        route, self.route = self.route, None
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


class ReplicaAdapters:
    """Knows the adapters of all replicas, which have the same (an :class:`~paged_sdk.loaded_adapters.Adapters`)."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = tuple(replicas)

    @property
    def names(self) -> tuple[str, ...]:
        return self._first().names

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        return self._first().infos

    def use(self, name: str | None) -> AdapterUse | None:
        return self._first().use(name)

    async def load(self, path: str | PathLike[str], name: str | None) -> None:
        """Load an adapter everywhere, or nowhere."""
        before = self.names
        done: list[Replica] = []
        try:
            for replica in self._living():
                await replica.adapters.load(path, name)
                done.append(replica)
        except BaseException:
            for replica in done:
                for new in set(replica.adapters.names).difference(before):
                    await replica.adapters.unload(new)
            raise

    async def unload(self, name: str) -> None:
        """Unload an adapter everywhere."""
        for replica in self._living():
            await replica.adapters.unload(name)

    def _living(self) -> list[Replica]:
        return [each for each in self._replicas if each.why_not is None] or [self._replicas[0]]

    def _first(self) -> Adapters:
        return self._living()[0].adapters

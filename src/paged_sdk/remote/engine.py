"""Use an engine that runs elsewhere: send it requests and operations, and deliver its output."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import count

from attrs import evolve, frozen

from paged_sdk.config.isq import IsqType
from paged_sdk.engine.events import Outbox, RequestEvent
from paged_sdk.engine.request_start import RequestStart
from paged_sdk.errors import EngineDeadError, PagedError
from paged_sdk.guard import request_failure
from paged_sdk.logs import get_logger
from paged_sdk.remote.link import Link, Parcel
from paged_sdk.remote.messages import (
    Abort,
    Answer,
    Ask,
    CancelOperation,
    Close,
    Ended,
    FromEngine,
    Operation,
    Output,
    Requantize,
    ResetPrefixCache,
    Submit,
)
from paged_sdk.remote.packing import pack, pack_processors, pack_request, unpack
from paged_sdk.scheduler.request import Request
from paged_sdk.system.event_loop import OutputLoop, wait_until_done
from paged_sdk.system.owner import Owner, closed_model
from paged_sdk.types.adapter import AdapterUse
from paged_sdk.types.stats import ModelStats
from paged_sdk.worker.subscription import Subscriber

__all__ = ["RemoteEngine"]

_log = get_logger(__name__)


@frozen(eq=False)
class _Live:
    """Holds an unfinished request."""

    request_id: str
    arrival: float
    subscription: Subscriber


class RemoteEngine:
    """Sends requests to an engine that runs elsewhere (an :class:`~paged_sdk.worker.engine_access.EngineAccess`).

    Requests, operations and aborts go through a link. The link's reader calls :meth:`receive` and :meth:`lost`, on any
    thread, one call at a time. Output is delivered to the event loops of its readers, with one wake-up per loop and
    message. Every request gets an answer: if the link is lost, an :class:`EngineDeadError`.

    :param name: names the engine in errors, such as "replica 1 (process 4711)"
    :param stats: the engine's current statistics
    :ivar adapters: the engine's adapters, by name
    """

    def __init__(self, link: Link, *, name: str, stats: ModelStats, adapters: Mapping[str, AdapterUse]) -> None:
        self.adapters: Mapping[str, AdapterUse] = adapters
        self._link = link
        self._name = name
        self._stats = stats
        self._owner = Owner()
        self._numbers = count()
        self._live: dict[int, _Live] = {}
        self._number_of: dict[str, int] = {}
        self._asked: dict[int, Future[None]] = {}
        self._death: EngineDeadError | None = None
        self._is_closing = False
        self._has_ended = False

    @property
    def name(self) -> str:
        """Return the engine's name in errors."""
        return self._name

    @property
    def stats(self) -> ModelStats:
        """Return the latest snapshot received."""
        return self._stats

    @property
    def is_idle(self) -> bool:
        """Tell whether no request and no operation is unfinished."""
        return not (self._live or self._asked)

    def check(self) -> None:
        """Raise if the engine accepts no more work.

        :raises ModelClosedError: the engine was closed, or this process is a forked child of the one that built it
        :raises EngineDeadError: the engine or its process has died
        """
        self.check_process()
        if self._death is not None:
            raise self._dead()
        if self._is_closing or self._has_ended:
            raise closed_model()

    def check_process(self) -> None:
        """Raise in a forked child of the process that built the model.

        :raises ModelClosedError: this is such a child
        """
        self._owner.check()

    @property
    def is_this_thread(self) -> bool:
        """Return False: no thread of this process steps the engine."""
        return False

    def submit(self, request: Request, subscription: Subscriber) -> None:
        """Send a request; its outcome, even a refusal, arrives at the subscription.

        :raises InvalidRequestError: a part of the request cannot be pickled, such as a lambda as logits processor
        :raises ModelClosedError: see :meth:`check`
        :raises EngineDeadError: see :meth:`check`
        """
        self.check()
        processors, sent = request.options.logits_processors, request
        if processors:
            sent = evolve(request, options=evolve(request.options, logits_processors=()))
        number = next(self._numbers)
        message = Submit(number, time.monotonic() - request.arrival, pack_processors(processors))
        parcel = [*pack(message), *pack_request(sent)]
        self._live[number] = _Live(request.request_id, request.arrival, subscription)
        self._number_of[request.request_id] = number
        self._link.send(parcel)
        self._sweep_if_ended()

    def abort(self, request_id: str) -> None:
        """End a request. Safe in finalizers; unknown ids are ignored."""
        number = self._number_of.get(request_id)
        if number is not None:
            self._link.send(pack(Abort(number)))

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        await self.ask(ResetPrefixCache())

    async def requantize(self, isq: IsqType) -> None:
        """Requantize the weights: see :meth:`paged_sdk.Model.re_isq_model`."""
        await self.ask(Requantize(isq))

    async def ask(self, operation: Operation, *, undo: Operation | None = None) -> None:
        """Send an operation and wait for its outcome. If the caller is cancelled, the operation is, too.

        :param undo: reverts the operation; sent, without waiting, if the cancellation comes too late
        :raises PagedError: the operation has failed
        """
        self.check()
        number = next(self._numbers)
        future: Future[None] = Future()
        self._asked[number] = future
        self._link.send(pack(Ask(number, operation)))
        self._sweep_if_ended()
        try:
            await wait_until_done(future)
        except BaseException:
            self._link.send(pack(CancelOperation(number)))
            if undo is not None:
                future.add_done_callback(partial(self._undo, undo))
            raise
        try:
            future.result()
        finally:
            del future  # an error's traceback holds this frame, and the future holds the error

    def _undo(self, undo: Operation, done: Future[None]) -> None:
        if done.exception() is None:
            self._link.send(pack(Ask(next(self._numbers), undo)))

    def close(self, *, drain: bool = False) -> None:
        """Refuse new work and tell the engine to end, without waiting for it. Idempotent."""
        self._is_closing = True
        if self._owner.is_here:
            self._link.send(pack(Close(drain)))

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the engine's end; False if it has not ended after ``timeout`` seconds."""
        return not self._owner.is_here or self._link.join(timeout)

    # Called by the link's reader

    def receive(self, parcel: Parcel) -> None:
        """Unpack and handle a message from the engine."""
        self.take(unpack(parcel))

    def take(self, message: FromEngine) -> None:
        """Handle an unpacked message from the engine."""
        match message:
            case Output():
                self._take_output(message)
            case Answer(number, adapters, error):
                self.adapters = adapters
                future = self._asked.pop(number, None)
                if future is not None:
                    with suppress(InvalidStateError):
                        if error is None:
                            future.set_result(None)
                        else:
                            future.set_exception(self._named(error.received()))
            case Ended(error):
                self._end(None if error is None else self._named(error.received()))

    def lost(self, reason: str) -> None:
        """Fail everything unfinished, since no message will come any more.

        :param reason: why the link was lost, for the errors
        """
        if self._has_ended:
            return
        self._end(EngineDeadError(f"{self._name}: {reason}"))

    def _take_output(self, output: Output) -> None:
        if output.stats is not None:
            self._stats = output.stats
        outboxes: defaultdict[OutputLoop, Outbox] = defaultdict(Outbox)
        for number, index, token_ids in zip(output.numbers, output.indices, output.token_ids, strict=True):
            live = self._live.get(number)
            if live is not None:
                outbox = outboxes[live.subscription.loop]
                outbox.listeners.append(live.subscription)
                outbox.indices.append(index)
                outbox.token_ids.append(list(token_ids))
        errors = [
            (number, RequestEvent(request_id="", error=self._named(error.received())))
            for number, error in output.errors
        ]
        # Set before the errors are delivered, so that requests routed to another replica do not come back here.
        deaths = (event.error for _, event in errors if isinstance(event.error, EngineDeadError))
        self._death = self._death or next(deaths, None)
        for number, event in (*output.events, *errors):
            live = self._live.get(number)
            if live is None:
                continue
            if event.start is not None:
                event = evolve(event, start=_by_own_clock(event.start, live.arrival))
            if event.is_last:
                self._forget(number)
            if event.error is not None:
                event = evolve(event, error=request_failure(event.error, live.request_id))
            outboxes[live.subscription.loop].events.append((live.subscription, event))
        for loop, outbox in outboxes.items():
            self._hand_over(loop, outbox)

    def _hand_over(self, loop: OutputLoop, outbox: Outbox) -> None:
        try:
            hears = loop.call_soon(outbox.deliver)
        except Exception as error:  # it is unknown how much of the output the loop has got
            for number, live in list(self._live.items()):
                if live.subscription.loop == loop:
                    self._link.send(pack(Abort(number)))
                    self._fail(number, request_failure(error, live.request_id))
            return
        if not hears:  # the loop ended without closing its requests: nobody will read them
            for number, live in list(self._live.items()):
                if live.subscription.loop == loop:
                    self._link.send(pack(Abort(number)))
                    self._forget(number)

    def _end(self, death: Exception | None) -> None:
        """Record the engine's end, and answer everything unfinished."""
        if isinstance(death, EngineDeadError):
            self._death = death
            _log.error("%s", death)
        self._stats = self._stats.at_rest()
        self._has_ended = True
        self._sweep_if_ended()

    def _sweep_if_ended(self) -> None:
        """Answer everything unfinished if the engine has ended. Senders call this after each message, which may have
        come after the end.
        """
        if not self._has_ended:
            return
        for number in list(self._live):
            self._fail(number, self._ending())
        while self._asked:
            with suppress(KeyError, InvalidStateError):
                self._asked.popitem()[1].set_exception(self._ending())

    def _fail(self, number: int, error: PagedError) -> None:
        """End a request with an error."""
        live = self._forget(number)
        if live is None:
            return
        event = RequestEvent(request_id=live.request_id, error=error)
        for _ in range(2):  # retry if the loop raises, since the request would wait for ever without an answer
            with suppress(Exception):
                live.subscription.loop.call_soon(partial(live.subscription.add, event))
                return

    def _forget(self, number: int) -> _Live | None:
        live = self._live.pop(number, None)
        if live is not None:
            self._number_of.pop(live.request_id, None)
        return live

    def _named(self, error: Exception) -> Exception:
        """Add the engine's name to an :class:`EngineDeadError`; return other errors unchanged."""
        if isinstance(error, EngineDeadError):
            error.args = (f"{self._name}: {error}",)
        return error

    def _ending(self) -> PagedError:
        return self._dead() if self._death is not None else closed_model()

    def _dead(self) -> EngineDeadError:
        """Return a new error for each request, as the partial response is attached to it."""
        assert self._death is not None
        error = EngineDeadError(str(self._death))
        error.__cause__ = self._death.__cause__
        return error


def _by_own_clock(start: RequestStart, arrival: float) -> RequestStart:
    """Convert the times of a request's start to the clock of this process.

    :param arrival: when the request was made, by this process's clock
    """
    ahead = arrival - start.arrival
    return evolve(
        start,
        arrival=arrival,
        scheduled_at=None if start.scheduled_at is None else start.scheduled_at + ahead,
        first_token_at=None if start.first_token_at is None else start.first_token_at + ahead,
    )

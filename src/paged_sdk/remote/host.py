"""Serve an engine to a remote model: the counterpart of :class:`~paged_sdk.remote.engine.RemoteEngine`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeAlias

import anyio
from attrs import evolve

from paged_sdk.calls.preparation import in_thread
from paged_sdk.constraints.grammar import Language
from paged_sdk.engine.events import RequestEvent
from paged_sdk.errors import EngineDeadError, EngineError, ModelClosedError
from paged_sdk.guard import request_failure
from paged_sdk.logs import get_logger
from paged_sdk.model_insides import ModelInsides
from paged_sdk.remote.link import Parcel
from paged_sdk.remote.messages import (
    Abort,
    Answer,
    Ask,
    CancelOperation,
    Close,
    Ended,
    FromEngine,
    LoadAdapter,
    Operation,
    Output,
    Ping,
    Pong,
    Requantize,
    ResetPrefixCache,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from paged_sdk.remote.packing import ProcessorCache, pack, unpack, unpack_request
from paged_sdk.remote.sent_error import SentError
from paged_sdk.scheduler.request import Request
from paged_sdk.system.event_loop import EventLoop, OutputLoop
from paged_sdk.system.owner import closed_model
from paged_sdk.system.threads import thread_must_start
from paged_sdk.types.adapter import AdapterUse
from paged_sdk.types.stats import ModelStats
from paged_sdk.worker.worker import Worker

__all__ = ["EngineHost", "adapters_of"]

_log = get_logger(__name__)

_Task: TypeAlias = "Ask | CancelOperation | tuple[int, Request, Language]"


class EngineHost:
    """Handles the messages of a remote model with an engine of this process, and sends the engine's output.

    Requests are submitted on the thread that receives them. Output is sent on a thread of the host, the only one that
    waits for a slow link; meanwhile new output is merged into one message. Operations, and requests with a grammar to
    compile, are tasks of the event loop in which :meth:`serve` runs.

    :param insides: the model, whose engine runs in this process
    :param send: sends a parcel, and may block; called on one thread. An exception ends the sending
    :param owns_engine: whether to close the engine when the remote model is closed; if not, the engine serves others,
        too, and only this remote model's requests end
    :raises EngineError: the system refuses to start another thread
    """

    def __init__(self, insides: ModelInsides, send: Callable[[Parcel], object], *, owns_engine: bool = True) -> None:
        assert isinstance(insides.worker, Worker), "its engine runs elsewhere"
        self._insides = insides
        self._worker = insides.worker
        self._send = send
        self._owns_engine = owns_engine
        self._is_closing = False
        self._processors = ProcessorCache()
        self._ids: dict[int, str] = {}
        self._aborted: set[int] = set()  # perhaps while their grammars are compiled
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._outgoing: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._frame = _Frame()
        self._loop = EventLoop()
        self._tasks, self._to_do = anyio.create_memory_object_stream[_Task](float("inf"))
        self._wake = partial(self._outgoing.put, None)
        self._worker.watch(self._wake)
        self._outgoing.put(None)  # the engine may have ended already
        self._thread = threading.Thread(target=self._run, name="paged-sdk host", daemon=True)
        with thread_must_start("to send output in"):
            self._thread.start()

    # On the receiving thread

    def receive(self, parcel: Parcel) -> None:
        """Handle a message; one call at a time, on any thread."""
        message: ToEngine = unpack(parcel)
        match message:
            case Submit(number):
                try:
                    self._submit(message, parcel[1:])
                except Exception as error:
                    self._refuse(number, error)
            case Abort(number):
                request_id = self._ids.get(number)
                if request_id is not None:
                    self._aborted.add(number)
                    self._worker.abort(request_id)
            case Ask() | CancelOperation():  # in order: a CancelOperation must find its Ask begun
                self._loop.call_soon(partial(self._begin, message))
            case Ping():  # answered on the sending thread, which no step blocks
                self.call_soon(self._answer_ping)
            case Close(drain) if self._owns_engine:
                self._worker.close(drain=drain)
            case Close(drain):
                self._is_closing = True
                if not drain:
                    self._abort_all()
                self._wake()

    def _submit(self, message: Submit, parts: Parcel) -> None:
        request = unpack_request(parts, self._insides.preparer)
        request = evolve(request, arrival=time.monotonic() - message.age)
        if self._is_closing:
            raise closed_model()
        if message.processors:
            processors = tuple(map(self._processors.get, message.processors))
            request = evolve(request, options=evolve(request.options, logits_processors=processors))
        self._ids[message.number] = request.request_id
        if request.language is None:
            self._worker.submit(request, _Sender(self, message.number))
        else:
            self._loop.call_soon(partial(self._begin, (message.number, request, request.language)))

    def _abort_all(self) -> None:
        for number, request_id in list(self._ids.items()):
            self._aborted.add(number)
            self._worker.abort(request_id)

    def _refuse(self, number: int, error: Exception) -> None:
        failure = request_failure(error, self._ids.get(number, ""))
        self.call_soon(partial(_Sender(self, number).fail, failure))

    # In the event loop

    async def serve(self) -> None:
        """Run operations and compile grammars, until the engine has ended and all output is sent. To be called once, in
        the event loop in which the host was made.
        """
        async with anyio.create_task_group() as tasks, self._to_do, self._tasks:
            async for task in self._to_do:
                match task:
                    case Ask(number):
                        self._scopes[number] = scope = anyio.CancelScope()
                        tasks.start_soon(self._answer, task, scope)
                    case CancelOperation(number) if number in self._scopes:
                        self._scopes[number].cancel()
                    case CancelOperation():  # the operation is answered already
                        pass
                    case _:
                        tasks.start_soon(self._compile, *task)
            tasks.cancel_scope.cancel()

    def _begin(self, task: _Task) -> None:
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # the engine has ended
            self._tasks.send_nowait(task)

    async def _answer(self, ask: Ask, scope: anyio.CancelScope) -> None:
        failure: SentError | None = None
        with scope:
            try:
                await self._do(ask.operation)
            except Exception as error:
                failure = SentError.of(error)
        if scope.cancelled_caught:  # tells the other side that the operation was not done
            failure = SentError.of(EngineError("nobody waits for it any more"))
        del self._scopes[ask.number]
        answer = Answer(ask.number, adapters_of(self._insides), failure)
        self.call_soon(partial(self._send_message, answer))

    async def _do(self, operation: Operation) -> None:
        insides = self._insides
        match operation:
            case ResetPrefixCache():
                await self._worker.reset_prefix_cache()
            case Requantize(isq):
                if insides.check_isq is not None:
                    insides.check_isq(isq)
                await self._worker.requantize(isq)
            case LoadAdapter(path, name):
                await insides.adapters.load(path, name)
            case UnloadAdapter(name):
                await insides.adapters.unload(name)

    async def _compile(self, number: int, request: Request, language: Language) -> None:
        """Compile a request's grammar, then submit the request."""
        try:
            grammar = await in_thread(partial(self._insides.preparer.grammar, language))
            self._worker.submit(evolve(request, grammar=grammar), _Sender(self, number))
            if number in self._aborted:  # during compilation
                self._worker.abort(request.request_id)
        except Exception as error:
            self._refuse(number, error)

    # On the sending thread

    def call_soon(self, callback: Callable[[], object]) -> bool:
        """Queue a callback, which collects output, for the sending thread. The host is its subscribers' output loop."""
        self._outgoing.put(callback)
        return True

    @property
    def frame(self) -> _Frame:
        """Return the output to send next."""
        return self._frame

    def ended(self, number: int) -> None:
        """Forget a request."""
        self._ids.pop(number, None)
        self._aborted.discard(number)

    def _run(self) -> None:
        sent: ModelStats | None = None
        try:
            while True:
                taken = self._outgoing.get()
                has_ended = self._worker.has_ended
                while True:
                    if taken is not None:
                        taken()
                    try:
                        taken = self._outgoing.get_nowait()
                    except Empty:
                        break
                stats = self._worker.stats
                self._flush(None if stats == sent else stats)
                sent = stats
                if has_ended or (self._is_closing and not self._ids):
                    break
            self._send(pack(Ended(self._death())))
        except Exception as error:  # of any kind: output cannot reach the requests' callers any more
            _log.info("output cannot be sent any more: %r", error)
            self._abort_all()
        finally:
            self._worker.unwatch(self._wake)
            self._loop.call_soon(self._tasks.close)

    def _death(self) -> SentError | None:
        try:
            self._worker.check()
        except EngineDeadError as error:
            return SentError.of(error)
        except ModelClosedError:
            return None
        return None

    def _flush(self, stats: ModelStats | None) -> None:
        frame, self._frame = self._frame, _Frame()
        if stats is not None or not frame.is_empty:
            self._send(pack(frame.output(stats)))

    def _answer_ping(self) -> None:
        self._send_message(Pong(self._worker.running_step))

    def _send_message(self, message: FromEngine) -> None:
        self._flush(None)
        self._send(pack(message))


def adapters_of(insides: ModelInsides) -> Mapping[str, AdapterUse]:
    """Return the adapters that a model has, by name."""
    found = {name: insides.adapters.use(name) for name in insides.adapters.names}
    return {name: use for name, use in found.items() if use is not None}


class _Frame:
    """Collects output until it is sent; output that comes while the link is busy becomes one message."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], int] = {}
        self._token_ids: list[list[int]] = []
        self._events: list[tuple[int, RequestEvent]] = []
        self._errors: list[tuple[int, SentError]] = []

    @property
    def is_empty(self) -> bool:
        return not (self._places or self._events or self._errors)

    def add_tokens(self, number: int, index: int, token_ids: list[int]) -> None:
        place = self._places.setdefault((number, index), len(self._token_ids))
        if place == len(self._token_ids):
            self._token_ids.append(token_ids)
        else:
            self._token_ids[place] = self._token_ids[place] + token_ids  # the list is the runner's own

    def add(self, number: int, event: RequestEvent) -> None:
        if event.error is not None:
            self._errors.append((number, SentError.of(event.error)))
        else:
            self._events.append((number, event))

    def output(self, stats: ModelStats | None) -> Output:
        """Return the collected output as a message."""
        numbers, indices = zip(*self._places, strict=True) if self._places else ((), ())
        return Output(numbers, indices, self._token_ids, self._events, self._errors, stats)


class _Sender:
    """Takes the output of one request (a :class:`~paged_sdk.worker.subscription.Subscriber`)."""

    __slots__ = ("_host", "_number")

    def __init__(self, host: EngineHost, number: int) -> None:
        self._host = host
        self._number = number

    @property
    def loop(self) -> OutputLoop:
        return self._host

    def add_tokens(self, index: int, token_ids: list[int]) -> None:
        self._host.frame.add_tokens(self._number, index, token_ids)

    def add(self, event: RequestEvent) -> None:
        self._host.frame.add(self._number, event)
        if event.is_last:
            self._host.ended(self._number)

    def fail(self, error: Exception) -> None:
        self.add(RequestEvent(request_id="", error=error))

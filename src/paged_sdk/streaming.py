"""Streams the response of one request to the task that reads it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from paged_sdk.calls.responses import ChoiceDelta, Header, ResponseParts, ResponseShape
from paged_sdk.engine.request_start import RequestStart
from paged_sdk.errors import EngineDeadError, InvalidRequestError, RequestError
from paged_sdk.guard import request_failure, request_timeout
from paged_sdk.scheduler.request import Request
from paged_sdk.system.owner import OfOneProcess
from paged_sdk.types.response import ChatCompletionResponse, CompletionResponse
from paged_sdk.worker.engine_access import EngineAccess
from paged_sdk.worker.joined_requests import joined_subscribers
from paged_sdk.worker.subscription import Subscription

if TYPE_CHECKING:
    from paged_sdk.errors import PartialResponse

__all__ = ["ResponseStream", "collect_all"]

ResponseT = TypeVar("ResponseT")
ChunkT = TypeVar("ChunkT")


class ResponseStream(OfOneProcess, Generic[ResponseT, ChunkT]):
    """Iterates over the chunks of one response; as an async context manager it ends the request on exit.

    The request starts when the first chunk is asked for or the context is entered. However reading ends - the end of
    the text, :meth:`aclose`, leaving the context, cancellation, a timeout, or dropping the stream - the request's KV
    blocks are free within two engine steps. A stream belongs to the event loop that it was started in; reading it in
    another one raises :class:`InvalidRequestError`.

    :raises RequestTimeoutError: the request's own timeout has passed
    :raises NumericalError: NaN or Inf logits
    :raises LogitsProcessorError: a logits processor of the request failed
    :raises QueueFullError: too many requests are waiting
    :raises RequestFailedError: an unforeseen exception in the work for this request
    :raises EngineDeadError: the engine stopped
    """

    def __init__(
        self,
        worker: EngineAccess,
        prepare: Callable[[], Awaitable[Sequence[Request]]],
        shape: ResponseShape[ResponseT, ChunkT],
        parts: ResponseParts,
        *,
        request_id: str,
        part_ids: Sequence[str],
        model: str,
        timeout: float | None,
    ) -> None:
        self._worker = worker
        self._prepare = prepare
        self._shape = shape
        self._header = Header(id=request_id, created=int(time.time()), model=model)
        self._parts = parts
        self._waiting: deque[list[ChoiceDelta]] = deque()
        self._part_ids = tuple(part_ids)
        self._timeout = timeout
        self._deadline = math.inf
        self._subscription: Subscription | None = None
        self._when_whole: Callable[[ResponseT], object] | None = None
        self._is_live = False
        self._is_read = False
        self._ended = False

    @property
    def request_id(self) -> str:
        """Return the id of the request, which the response has too."""
        return self._header.id

    @property
    def part_ids(self) -> tuple[str, ...]:
        """Return the ids by which the engine knows the request: one for each prompt."""
        return self._part_ids

    def __aiter__(self) -> ResponseStream[ResponseT, ChunkT]:
        return self

    async def __anext__(self) -> ChunkT:
        with _Reading(self):
            while not self._waiting and not self._ended:
                self._waiting += await self._read()
                if not self._waiting and self._parts.usage is not None:
                    self._waiting.append([])
            if self._waiting:
                deltas = self._waiting.popleft()
                is_last = self._ended and not self._waiting
                if is_last:
                    self._note_whole()
                return self._shape.chunk(self._header, deltas, self._parts.usage if is_last else None)
        raise StopAsyncIteration

    async def __aenter__(self) -> ResponseStream[ResponseT, ChunkT]:
        with _Reading(self):
            await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the request if it has not ended; :meth:`response_so_far` keeps what was read. Idempotent."""
        self._ended = True
        self._waiting.clear()
        self._abort()

    async def collect(self) -> ResponseT:
        """Read the rest and return the whole response."""
        with _Reading(self):
            is_left = bool(self._waiting) or not self._ended
            try:
                if not self._ended:
                    await self._read(until_end=True)
                if is_left:
                    self._note_whole()
            finally:
                self._waiting.clear()
                self._abort()
        return self.response_so_far()

    def response_so_far(self) -> ResponseT:
        """Return a response of what has been read, with its usage so far. A choice that has not ended has finish reason
        "canceled".
        """
        return self._shape.response(self._header, self._parts)

    def when_whole(self, act: Callable[[ResponseT], object]) -> None:
        """Set a function to be called with the whole response once its end has been read. It replaces an earlier one.

        It is not called if reading ends before, by an error, by leaving the stream or by closing the model.
        """
        self._when_whole = act

    def _begin_reading(self) -> None:
        """Mark the stream as being read.

        :raises InvalidRequestError: another task is reading it, since a stream has one reader at a time; or it was
            started in another event loop
        :raises ModelClosedError: the stream was started before this process was forked
        """
        if self._subscription is not None and not self._ended and not self._subscription.loop.is_current:
            self._worker.check_process()
            raise InvalidRequestError(
                f"the stream of request {self.request_id} was started in another event loop",
                request_id=self.request_id,
                field="stream",
                allowed="reading it where it was started",
            )
        if self._is_read:
            raise InvalidRequestError(
                f"another task is reading the stream of request {self.request_id}",
                request_id=self.request_id,
                field="stream",
                allowed="one reader at a time",
            )
        self._is_read = True

    def _end_reading(self, error: BaseException | None) -> None:
        """Mark the stream as no longer being read.

        :raises PagedError: in place of an ``error`` that is not a PagedError
        """
        self._is_read = False
        if isinstance(error, Exception):
            failure = request_failure(error, self.request_id)
            if failure is not error:
                raise failure

    async def _start(self) -> None:
        if self._subscription is not None or self._ended:
            return
        self._worker.check()
        if self._timeout is not None:
            self._deadline = anyio.current_time() + self._timeout
        with self._limit():
            try:
                requests = await self._prepare()
            except anyio.get_cancelled_exc_class():
                self._ended = True  # as for a later cancellation; the tokenizing thread has been told to stop
                raise
            if self._ended:  # closed by another task meanwhile
                return
            subscription = Subscription(self._parts.num_choices)
            starts = [_start_of(request) for request in requests]
            self._parts.begin(RequestStart.joined(starts))
            several = len(requests) > 1
            subscribers = joined_subscribers(subscription, starts) if several else [subscription]
            self._subscription = subscription
            self._is_live = True
            try:
                for request, subscriber in zip(requests, subscribers, strict=True):
                    self._worker.submit(request, subscriber)
            except BaseException:
                self._ended = True
                self._abort()
                raise

    async def _read(self, *, until_end: bool = False) -> list[list[ChoiceDelta]]:
        """Wait for output, or for all of it if ``until_end``, and process it; return the deltas of each chunk."""
        if self._subscription is None:
            await self._start()
        subscription = self._subscription
        if subscription is None:
            return []
        try:
            with self._limit():
                try:
                    await subscription.wait(until_end=until_end)
                except BaseException:  # output from before a timeout belongs to the partial response
                    with suppress(Exception):
                        self._parts.read(subscription)
                    raise
            deltas = self._parts.read(subscription)
        except BaseException:
            # Cancelled while waiting: the rest will not be read.
            self._ended = True
            self._abort()
            raise
        if subscription.error is not None and deltas and not until_end:
            return deltas  # output from before the error is returned first
        if subscription.error is not None:
            self._ended = True
            self._abort()  # if the error arose on this side, the engine does not know of it
            error = request_failure(subscription.error, self.request_id)
            if isinstance(error, RequestError | EngineDeadError):
                error.partial_response = self._partial_response()
            raise error
        if subscription.has_ended:
            self._is_live = False
            self._ended = True
        return deltas

    def _note_whole(self) -> None:
        """Call the function set by :meth:`when_whole`, if all choices are complete."""
        if self._when_whole is not None and self._parts.all_complete:
            self._when_whole(self.response_so_far())

    def _limit(self) -> AbstractContextManager[None]:
        """Apply the request's own timeout to one wait."""
        return nullcontext() if self._timeout is None else self._limit_to(self._timeout)

    @contextmanager
    def _limit_to(self, timeout: float) -> Iterator[None]:
        with anyio.CancelScope(deadline=self._deadline) as scope:
            yield
        if scope.cancelled_caught:
            self._ended = True
            self._abort()
            raise request_timeout(self.request_id, timeout, self._partial_response())

    def _partial_response(self) -> PartialResponse | None:
        response = self.response_so_far()
        assert isinstance(response, ChatCompletionResponse | CompletionResponse)
        return response

    def _abort(self) -> None:
        if self._is_live:
            self._is_live = False
            for part_id in self._part_ids:
                self._worker.abort(part_id)

    def __del__(self) -> None:
        # Dropped half-read. Only the mailbox is touched, which is safe in a finalizer.
        if getattr(self, "_is_live", False):
            self._abort()


async def collect_all(streams: Sequence[ResponseStream[ResponseT, ChunkT]]) -> list[ResponseT]:
    """Read several streams to their ends at once, and return their responses, in order.

    The first error ends all of them and is raised.
    """
    responses: dict[int, ResponseT] = {}
    first_error: list[Exception] = []

    async def run(index: int, stream: ResponseStream[ResponseT, ChunkT], scope: anyio.CancelScope) -> None:
        try:
            responses[index] = await stream.collect()
        except Exception as error:
            first_error.append(error)
            scope.cancel()

    async with anyio.create_task_group() as tasks:
        for index, stream in enumerate(streams):
            tasks.start_soon(run, index, stream, tasks.cancel_scope)
    if first_error:
        raise first_error[0]
    return [responses[index] for index in range(len(streams))]


class _Reading:
    """Marks a stream as being read within a ``with`` block. A class, because one is made per chunk and a
    generator-based context manager takes a microsecond.
    """

    __slots__ = ("_stream",)

    def __init__(self, stream: ResponseStream[Any, Any]) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._stream._begin_reading()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream._end_reading(error)


def _start_of(request: Request) -> RequestStart:
    return RequestStart(
        prompt_tokens=len(request.prompt_token_ids), num_choices=request.num_choices, arrival=request.arrival
    )

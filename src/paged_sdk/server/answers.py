"""Answers requests that generate text: whole, or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

import anyio
from attrs import frozen
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from paged_sdk.server.drain import Drain
from paged_sdk.server.errors import problem_for
from paged_sdk.server.front import HUNG_UP
from paged_sdk.server.image_urls import ImageUrls
from paged_sdk.server.metrics import Metrics
from paged_sdk.server.record import RequestRecord
from paged_sdk.server.served_models import ServedModels
from paged_sdk.server.settings import ServerSettings
from paged_sdk.server.threads import in_thread
from paged_sdk.server.tracing import RequestSpan
from paged_sdk.wire.body import read_json
from paged_sdk.wire.call import Answer, AnswerStream, Call, EventWriter
from paged_sdk.wire.problem import Problem, ProblemError

__all__ = ["Answers", "read_body", "unless_client_leaves"]

T = TypeVar("T")
AnswerT = TypeVar("AnswerT", bound=Answer)
ChunkT = TypeVar("ChunkT")

LARGE_BODY: Final = 1 << 16
"""Size in bytes from which a body is parsed in a thread: parsing as much takes a millisecond."""


BODY_SECONDS: Final = 30.0
SLOWEST_BODY: Final = 16 << 10
"""A body may take BODY_SECONDS, and one second more for every SLOWEST_BODY bytes: slower clients would use up
connections.
"""
CUT_OFF_SECONDS: Final = 0.5
"""Time to tell a client that its stream is cut off: the server shuts down a second after that."""


@frozen(kw_only=True)
class Answers(Generic[AnswerT, ChunkT]):
    """Answers one API's requests.

    :ivar operation: OpenTelemetry's name of the operation
    :ivar read: parses a body
    """

    operation: str
    read: Callable[[object], Call[AnswerT, ChunkT]]
    models: ServedModels
    metrics: Metrics
    settings: ServerSettings
    images: ImageUrls
    drain: Drain

    async def answer(self, request: Request) -> Response:
        """Answer one request.

        :raises PagedError: the model refuses the request, or fails; ``ProblemError`` if the body cannot be read
        """
        call = await read_body(request, self.read, self.settings.max_body_bytes, self.drain, images=self.images)
        served = self.models.find(call.model)
        record = RequestRecord.of(request.scope)
        record.model, record.adapter, record.label = served.name, served.adapter, call.label
        record.is_streamed, record.names = call.is_streamed, call.names
        span = RequestSpan(self.operation, call.model, request.headers)

        def note(answer: AnswerT) -> None:
            record.take(answer)
            self.metrics.note_answer(served.name, answer.usage)
            span.note_answer(served.name, answer.usage, answer.id, finish=record.finish)

        async def collect() -> AnswerT:
            return await call.collect(served.model, adapter=served.adapter, timeout=self.settings.timeout)

        try:
            if call.is_streamed:
                return EventStream(
                    call.send(served.model, adapter=served.adapter, timeout=self.settings.timeout),
                    call.writer(),
                    note,
                    span.end,
                    record,
                    self.drain,
                    keep_alive=self.settings.keep_alive,
                )
            answer = await unless_client_leaves(request, collect)
            if answer is not None:
                note(answer)
        except BaseException as error:
            span.end(error)
            raise
        span.end()
        if answer is None:
            return Response(status_code=HUNG_UP)
        return await in_thread(lambda: JSONResponse(call.response(answer)))


async def read_body(
    request: Request, read: Callable[[object], T], limit: int, drain: Drain, *, images: ImageUrls | None = None
) -> T:
    """Receive and parse the body of a request.

    :param read: parses the JSON value
    :param limit: maximum size in bytes
    :param images: fetches images that the body refers to by URL
    :raises ProblemError: the body is too long, arrives too slowly, or its content type is not JSON; or the server shuts
        down before it has arrived
    :raises PagedError: the body is malformed, or asks for something unsupported
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # browsers let any web page post other types without asking the server (CORS)
        message = f"the body's type is {kind[:100] or 'not given'}: expected the header Content-Type: application/json"
        raise ProblemError(Problem(status=415, message=message, code="unsupported_media_type"))
    data = await _data(request, limit, drain)
    if images is not None and images.hosts:
        value = await images.fill(await in_thread(lambda: read_json(data)))
        return await in_thread(lambda: read(value))
    return read(read_json(data)) if len(data) < LARGE_BODY else await in_thread(lambda: read(read_json(data)))


async def _data(request: Request, limit: int, drain: Drain) -> bytes:
    pieces, length = [], 0
    said = request.headers.get("content-length", "")
    if said.isascii() and said.isdecimal() and int(said) > limit:  # before the client has sent it
        raise _too_long(limit)
    start = anyio.current_time()
    try:
        with drain.coming() as scope:
            scope.deadline = start + BODY_SECONDS
            async for piece in request.stream():
                length += len(piece)
                if length > limit:
                    raise _too_long(limit)
                pieces.append(piece)
                scope.deadline = start + BODY_SECONDS + length / SLOWEST_BODY
    except ClientDisconnect:
        raise ProblemError(Problem(status=HUNG_UP, message="the client has hung up")) from None
    if scope.cancelled_caught and drain.has_begun:
        raise ProblemError(drain.refusal)
    if scope.cancelled_caught:
        message = f"of the body {length} bytes came in {anyio.current_time() - start:.0f} s, and then no more"
        raise ProblemError(Problem(status=408, message=message, code="timeout", headers={"Connection": "close"}))
    return b"".join(pieces)


def _too_long(limit: int) -> ProblemError:
    """Return the problem of a body that is too long. The connection stays open, and the rest of the body is discarded:
    closing it while the client sends would reset it, and many clients would then lose the response.
    """
    return ProblemError(Problem(status=413, message=f"the body is longer than {limit} bytes", code="body_too_large"))


async def unless_client_leaves(request: Request, work: Callable[[], Awaitable[T]]) -> T | None:
    """Run work for a client. If the client disconnects, cancel the work, which also aborts its request in the model,
    and return None.
    """
    result: T | None = None
    error: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_when_client_leaves, request.receive, tasks.cancel_scope)
        try:
            result = await work()
        except Exception as exception:  # raised below, outside the task group, which would wrap it in an ExceptionGroup
            error = exception
        tasks.cancel_scope.cancel()
    if error is not None:
        raise error
    return result


async def _cancel_when_client_leaves(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


class EventStream(Response, Generic[AnswerT, ChunkT]):
    """Sends an answer as events. If the client disconnects, the request is aborted.

    An error before the first chunk is raised, so that the response can still have its status. A slow client gets fewer
    and larger chunks: the stream merges those that were not read.

    :param note: receives the whole answer
    :param end: called after the last event, with the error if the request failed
    :param record: receives the partial answer if the client disconnects
    :param drain: tells whether the stream is cut off because the server shuts down
    :param keep_alive: seconds without an event after which a comment is sent
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        stream: AnswerStream[AnswerT, ChunkT],
        writer: EventWriter[AnswerT, ChunkT],
        note: Callable[[AnswerT], None],
        end: Callable[[Exception | None], None],
        record: RequestRecord,
        drain: Drain,
        *,
        keep_alive: float,
    ) -> None:
        # Proxies that buffer, such as nginx, would hold events back.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._stream = stream
        self._writer = writer
        self._note = note
        self._end = end
        self._keep_alive = keep_alive
        self._record = record
        self._drain = drain
        self._one_at_a_time = anyio.Lock(fast_acquire=True)
        self._before = ""  # the events at the start of a stream, until they are sent with the first chunk
        self._has_begun = False
        self._has_ended = False
        self._failure: Exception | None = None
        self._last_sent = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: Exception | None = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_when_client_leaves, receive, tasks.cancel_scope)
                tasks.start_soon(self._comment, send)
                try:
                    await self._answer(send)
                except Exception as exception:
                    error = exception
                tasks.cancel_scope.cancel()
        finally:
            if self._drain.is_over and self._has_begun and not self._has_ended:
                await self._cut_off(send)
            if self._has_begun and self._record.usage is None:  # the client disconnected, or the request failed
                self._record.take(self._stream.response_so_far())
            self._end(error or self._failure)
        if error is not None:
            raise error

    async def _answer(self, send: Send) -> None:
        async with self._stream:
            self._before = self._writer.begin(self._stream.response_so_far())
            try:
                while True:
                    try:
                        chunk = await self._stream.__anext__()
                    except StopAsyncIteration:
                        break
                    if events := self._with_beginning(self._writer.chunk(chunk)):
                        await self._send(send, events)
                answer = self._stream.response_so_far()
                last = self._writer.end(answer)
                self._note(answer)
            except Exception as error:
                if not self._has_begun:
                    raise
                self._failure = error
                problem = problem_for(error, self._record.request_id, self._record.names)
                self._record.error = problem.code or problem.type
                last = self._writer.failed(problem)
            await self._send(send, self._with_beginning(last), more=False)

    async def _cut_off(self, send: Send) -> None:
        """Send the error that the stream is cut off, if the client reads it in time."""
        problem = self._drain.interruption
        self._failure = ProblemError(problem)
        self._record.error = problem.code
        with anyio.move_on_after(CUT_OFF_SECONDS, shield=True):
            await self._send(send, self._with_beginning(self._writer.failed(problem)), more=False)

    def _with_beginning(self, events: str) -> str:
        """Prepend the events at the start of a stream, if they have not been sent yet."""
        before, self._before = self._before, ""
        return before + events

    async def _comment(self, send: Send) -> None:
        while True:
            left = self._last_sent + self._keep_alive - time.monotonic()
            if left > 0:
                await anyio.sleep(left)
            else:
                await self._send(send, ": still here\n\n")

    async def _send(self, send: Send, text: str, *, more: bool = True) -> None:
        async with self._one_at_a_time:
            if self._has_ended:  # a comment that waited for the lock while the last events were sent
                return
            self._has_ended = not more
            self._last_sent = time.monotonic()
            if not self._has_begun:
                self._has_begun = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

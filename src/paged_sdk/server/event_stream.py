"""Sends an answer to a client as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paged_sdk.server.disconnect import cancel_when_client_disconnects
from paged_sdk.server.drain import Drain
from paged_sdk.server.errors import problem_for
from paged_sdk.server.record import RequestRecord
from paged_sdk.wire.call import Answer, AnswerStream, EventWriter
from paged_sdk.wire.problem import ProblemError

__all__ = ["EventStream"]

AnswerT = TypeVar("AnswerT", bound=Answer)
ChunkT = TypeVar("ChunkT")

CUT_OFF_SECONDS: Final = 0.5
"""Time to tell a client that its stream is cut off: the server shuts down a second after that."""


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
                tasks.start_soon(cancel_when_client_disconnects, receive, tasks.cancel_scope)
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

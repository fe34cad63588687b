"""Answers requests that generate text: whole, or as server-sent events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from attrs import frozen
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paged_sdk.server.bodies import read_body
from paged_sdk.server.disconnect import CLIENT_DISCONNECTED, unless_client_disconnects
from paged_sdk.server.drain import Drain
from paged_sdk.server.event_stream import EventStream
from paged_sdk.server.image_urls import ImageUrls
from paged_sdk.server.metrics import Metrics
from paged_sdk.server.record import RequestRecord
from paged_sdk.server.served_models import ServedModels
from paged_sdk.server.settings import ServerSettings
from paged_sdk.server.threads import in_thread
from paged_sdk.server.tracing import RequestSpan
from paged_sdk.wire.call import Answer, Call

__all__ = ["Answers"]

AnswerT = TypeVar("AnswerT", bound=Answer)
ChunkT = TypeVar("ChunkT")


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
        call = call.with_defaults(served.model)
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
            answer = await unless_client_disconnects(request, collect)
            if answer is not None:
                note(answer)
        except BaseException as error:
            span.end(error)
            raise
        span.end()
        if answer is None:
            return Response(status_code=CLIENT_DISCONNECTED)
        return await in_thread(lambda: JSONResponse(call.response(answer)))

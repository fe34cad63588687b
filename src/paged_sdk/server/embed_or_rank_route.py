"""Serves requests that embed or rank texts without generating any: ``/v1/embeddings`` and ``/v1/rerank``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from attrs import frozen
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paged_sdk import Model
from paged_sdk.server.bodies import read_body
from paged_sdk.server.disconnect import CLIENT_DISCONNECTED, unless_client_disconnects
from paged_sdk.server.drain import Drain
from paged_sdk.server.record import RequestRecord
from paged_sdk.server.served_models import ServedModels
from paged_sdk.server.settings import ServerSettings
from paged_sdk.server.threads import in_thread
from paged_sdk.server.tracing import RequestSpan

__all__ = ["EmbedOrRankCall", "EmbedOrRankRoute"]


class EmbedOrRankCall(Protocol):
    """Describes a parsed request."""

    @property
    def model(self) -> str:
        """Return the name of the model."""
        ...

    @property
    def label(self) -> str | None:
        """Return the client's label for the end user."""
        ...

    async def send(self, model: Model, *, adapter: str | None, timeout: float | None) -> Any:
        """Send the request to a model."""
        ...

    def response(self, answer: Any) -> dict[str, Any]:
        """Return an answer in the API's form."""
        ...


@frozen(kw_only=True)
class EmbedOrRankRoute:
    """Serves one of these two APIs.

    :ivar operation: the API's name in traces
    :ivar read: parses a body
    """

    operation: str
    read: Callable[[object], EmbedOrRankCall]
    models: ServedModels
    settings: ServerSettings
    drain: Drain

    async def answer(self, request: Request) -> Response:
        """Answer one request.

        :raises PagedError: the model refuses the request, or fails; ``ProblemError`` if the body cannot be read
        """
        call = await read_body(request, self.read, self.settings.max_body_bytes, self.drain)
        served = self.models.find(call.model)
        record = RequestRecord.of(request.scope)
        record.model, record.adapter, record.label = served.name, served.adapter, call.label
        span = RequestSpan(self.operation, call.model, request.headers)
        try:
            answer = await unless_client_disconnects(
                request, lambda: call.send(served.model, adapter=served.adapter, timeout=self.settings.timeout)
            )
        except BaseException as error:
            span.end(error)
            raise
        if answer is not None:
            record.take(answer)
            span.note_answer(served.name, answer.usage)
        span.end()
        if answer is None:
            return Response(status_code=CLIENT_DISCONNECTED)
        return await in_thread(lambda: JSONResponse(call.response(answer)))

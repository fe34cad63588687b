"""Answer requests for what is read off texts: vectors, and ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from attrs import frozen
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paged_sdk import Model
from paged_sdk.server.answers import read_body, unless_client_leaves
from paged_sdk.server.drain import Drain
from paged_sdk.server.front import HUNG_UP
from paged_sdk.server.record import RequestRecord
from paged_sdk.server.served_models import ServedModels
from paged_sdk.server.settings import ServerSettings
from paged_sdk.server.threads import in_thread
from paged_sdk.server.tracing import RequestSpan

__all__ = ["ReadingCall", "ReadingRoute"]


class ReadingCall(Protocol):
    """Is what a body asks of a model."""

    @property
    def model(self) -> str:
        """Return the name of the model."""
        ...

    @property
    def label(self) -> str | None:
        """Return for whom it is."""
        ...

    async def send(self, model: Model, *, adapter: str | None, timeout: float | None) -> Any:
        """Ask a model."""
        ...

    def response(self, answer: Any) -> dict[str, Any]:
        """Return what the client gets of the answer."""
        ...


@frozen(kw_only=True)
class ReadingRoute:
    """Reads something off texts.

    :ivar operation: what it is called in traces
    :ivar read: finds out what a body asks for
    """

    operation: str
    read: Callable[[object], ReadingCall]
    models: ServedModels
    settings: ServerSettings
    drain: Drain

    async def answer(self, request: Request) -> Response:
        """Answer one request.

        :raises PagedError: the model refuses it, or fails; ``ProblemError`` likewise
        """
        call = await read_body(request, self.read, self.settings.max_body_bytes, self.drain)
        served = self.models.find(call.model)
        record = RequestRecord.of(request.scope)
        record.model, record.adapter, record.label = served.name, served.adapter, call.label
        span = RequestSpan(self.operation, call.model, request.headers)
        try:
            answer = await unless_client_leaves(
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
            return Response(status_code=HUNG_UP)
        return await in_thread(lambda: JSONResponse(call.response(answer)))

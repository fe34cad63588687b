"""Answer requests for vectors."""

from __future__ import annotations

from attrs import frozen
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paged_sdk.server.answers import read_body, unless_client_leaves
from paged_sdk.server.drain import Drain
from paged_sdk.server.front import HUNG_UP
from paged_sdk.server.record import RequestRecord
from paged_sdk.server.served_models import ServedModels
from paged_sdk.server.settings import ServerSettings
from paged_sdk.server.threads import in_thread
from paged_sdk.server.tracing import RequestSpan
from paged_sdk.wire.embeddings import read_embedding

__all__ = ["EmbeddingRoute"]


@frozen(kw_only=True)
class EmbeddingRoute:
    """Makes vectors of texts."""

    models: ServedModels
    settings: ServerSettings
    drain: Drain

    async def answer(self, request: Request) -> Response:
        """Answer one request.

        :raises PagedError: the model refuses it, or fails; ``ProblemError`` likewise
        """
        call = await read_body(request, read_embedding, self.settings.max_body_bytes, self.drain)
        served = self.models.find(call.model)
        record = RequestRecord.of(request.scope)
        record.model, record.adapter, record.label = served.name, served.adapter, call.label
        span = RequestSpan("embeddings", call.model, request.headers)
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

"""Serves requests that count the tokens of conversations, in Anthropic's and OpenAI's form."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paged_sdk.server.bodies import read_body
from paged_sdk.server.disconnect import CLIENT_DISCONNECTED, unless_client_disconnects
from paged_sdk.server.drain import Drain
from paged_sdk.server.image_urls import ImageUrls
from paged_sdk.server.record import RequestRecord
from paged_sdk.server.served_models import ServedModels
from paged_sdk.server.settings import ServerSettings
from paged_sdk.wire.count_tokens import CountTokensCall

__all__ = ["CountRoute"]


@frozen(kw_only=True)
class CountRoute:
    """Serves one of these two APIs.

    :ivar read: parses a body
    """

    read: Callable[[object], CountTokensCall]
    models: ServedModels
    settings: ServerSettings
    images: ImageUrls
    drain: Drain

    async def answer(self, request: Request) -> Response:
        """Answer one request.

        :raises PagedError: the conversation cannot be tokenized; ``ProblemError`` if the body cannot be read
        """
        call = await read_body(request, self.read, self.settings.max_body_bytes, self.drain, images=self.images)
        served = self.models.find(call.model)
        record = RequestRecord.of(request.scope)
        record.model, record.adapter = served.name, served.adapter
        count = await unless_client_disconnects(request, lambda: served.model.count_tokens(call.request))
        return Response(status_code=CLIENT_DISCONNECTED) if count is None else JSONResponse(call.response(count))

"""Assembles the ASGI application that serves models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from attrs import frozen
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from paged_sdk import ConfigError, Model
from paged_sdk.server.adapter_routes import AdapterRoutes
from paged_sdk.server.answers import Answers
from paged_sdk.server.chat_page import PAGE_ROUTES, ChatPage
from paged_sdk.server.count_route import CountRoute
from paged_sdk.server.drain import Drain
from paged_sdk.server.embed_or_rank_route import EmbedOrRankRoute
from paged_sdk.server.errors import problem_response
from paged_sdk.server.image_urls import ImageUrls
from paged_sdk.server.metrics import Metrics
from paged_sdk.server.openapi import Operation, openapi_document
from paged_sdk.server.request_middleware import RequestMiddleware
from paged_sdk.server.served_models import ModelSource, ServedModels
from paged_sdk.server.settings import ServerSettings
from paged_sdk.wire.adapters import LOAD_ADAPTER, UNLOAD_ADAPTER
from paged_sdk.wire.body import BodyReader
from paged_sdk.wire.call import Call
from paged_sdk.wire.chat_completions import CHAT_COMPLETION, read_chat_completion
from paged_sdk.wire.completions import COMPLETION, read_completion
from paged_sdk.wire.embeddings import EMBEDDING, read_embedding
from paged_sdk.wire.forms import (
    AdapterUnloaded,
    ChatCompletion,
    ChatCompletionChunk,
    Embeddings,
    Error,
    Health,
    InputTokenCount,
    ModelForm,
    ModelList,
    RankedDocuments,
    TextCompletion,
    TokenCount,
)
from paged_sdk.wire.messages import COUNT_TOKENS, MESSAGES, read_count_tokens, read_messages
from paged_sdk.wire.messages_forms import AnthropicError, MessageEvent, WholeMessage
from paged_sdk.wire.models import model_card, model_list
from paged_sdk.wire.problem import Problem
from paged_sdk.wire.rerank import RERANK, read_rerank
from paged_sdk.wire.responses import INPUT_TOKENS, RESPONSES, read_input_tokens, read_responses
from paged_sdk.wire.responses_forms import ResponseEvent, WholeResponse

__all__ = ["ModelServer", "create_app"]


@frozen
class Api:
    """Describes an API that generates text.

    :ivar operation: OpenTelemetry's name of the operation
    :ivar read: parses a body
    :ivar described: the API's description in the OpenAPI document
    """

    operation: str
    body: BodyReader[Any]
    read: Callable[[object], Call[Any, Any]]
    described: Operation


APIS: Final = (
    Api(
        "chat",
        CHAT_COMPLETION,
        read_chat_completion,
        Operation(
            path="/v1/chat/completions",
            summary="Continue a conversation.",
            body=CHAT_COMPLETION,
            answer=ChatCompletion,
            event=ChatCompletionChunk | Error,
        ),
    ),
    Api(
        "text_completion",
        COMPLETION,
        read_completion,
        Operation(
            path="/v1/completions",
            summary="Continue a text.",
            body=COMPLETION,
            answer=TextCompletion,
            event=TextCompletion | Error,
        ),
    ),
    Api(
        "chat",
        RESPONSES,
        read_responses,
        Operation(
            path="/v1/responses",
            summary="Continue a conversation, as items.",
            body=RESPONSES,
            answer=WholeResponse,
            event=ResponseEvent,
            has_names=True,
        ),
    ),
    Api(
        "chat",
        MESSAGES,
        read_messages,
        Operation(
            path="/v1/messages",
            summary="Continue a conversation, in Anthropic's form.",
            body=MESSAGES,
            answer=WholeMessage,
            event=MessageEvent,
            has_names=True,
            error=AnthropicError,
        ),
    ),
)
RERANK_PATHS: Final = ("/v1/rerank", "/v2/rerank", "/rerank")
"""Where clients of Jina's API, Cohere's second API and vLLM's look for it."""
OTHERS: Final = (
    Operation(path="/v1/embeddings", summary="Embed texts.", body=EMBEDDING, answer=Embeddings),
    *(
        Operation(
            path=path, summary="Sort documents by their relevance to a query.", body=RERANK, answer=RankedDocuments
        )
        for path in RERANK_PATHS
    ),
    Operation(
        path="/v1/messages/count_tokens",
        summary="Count the tokens of a conversation.",
        body=COUNT_TOKENS,
        answer=TokenCount,
        error=AnthropicError,
    ),
    Operation(
        path="/v1/responses/input_tokens",
        summary="Count the tokens of a response's input.",
        body=INPUT_TOKENS,
        answer=InputTokenCount,
    ),
    Operation(path="/v1/models", summary="List models and adapters.", answer=ModelList),
    Operation(
        path="/v1/models/{model}", summary="Describe a model or an adapter.", parameter="model", answer=ModelForm
    ),
    Operation(path="/v1/load_lora_adapter", summary="Load an adapter.", body=LOAD_ADAPTER, answer=ModelForm),
    Operation(
        path="/v1/unload_lora_adapter", summary="Unload an adapter.", body=UNLOAD_ADAPTER, answer=AdapterUnloaded
    ),
    Operation(path="/health", summary="Tell whether the process is healthy.", answer=Health, unavailable=Health),
    Operation(path="/ready", summary="Tell whether requests are accepted.", answer=Health, unavailable=Health),
    Operation(path="/metrics", summary="Show Prometheus metrics."),
)


class _Route(Route):
    """Puts itself into the request's scope, as Starlette does from 1.7 on, for the metrics and the log."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, of_route = super().matches(scope)
        return match, {**of_route, "route": self}


class ModelServer(Starlette):
    """Serves models as an ASGI application. Create one with :func:`create_app`.

    :ivar models: the served models
    :ivar settings: the server's settings
    :ivar drain: tracks running requests, and refuses new ones during shutdown
    """

    def __init__(self, models: ServedModels, settings: ServerSettings) -> None:
        self.models = models
        self.settings = settings
        self.drain: Drain = Drain()
        self._metrics = metrics = Metrics(models, self.drain)
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
        requests = Middleware(RequestMiddleware, settings=settings, drain=self.drain, metrics=metrics)
        images = ImageUrls(settings.image_hosts, settings.max_body_bytes)
        answers = partial(Answers, models=models, metrics=metrics, settings=settings, images=images, drain=self.drain)
        embed_or_rank = partial(EmbedOrRankRoute, models=models, settings=settings, drain=self.drain)
        counts = partial(CountRoute, models=models, settings=settings, images=images, drain=self.drain)
        adapters = AdapterRoutes(models=models, settings=settings, drain=self.drain)
        page = ChatPage()
        super().__init__(
            routes=[
                *(
                    _Route(
                        api.described.path,
                        answers(operation=api.operation, read=settings.reader(api.body, api.read)).answer,
                        methods=["POST"],
                    )
                    for api in APIS
                ),
                _Route(
                    "/v1/embeddings",
                    embed_or_rank(operation="embeddings", read=read_embedding).answer,
                    methods=["POST"],
                ),
                *(
                    _Route(path, embed_or_rank(operation="rerank", read=read_rerank).answer, methods=["POST"])
                    for path in RERANK_PATHS
                ),
                _Route("/v1/messages/count_tokens", counts(read=read_count_tokens).answer, methods=["POST"]),
                _Route("/v1/responses/input_tokens", counts(read=read_input_tokens).answer, methods=["POST"]),
                _Route("/v1/models", self._list_models),
                _Route("/v1/models/{model:path}", self._show_model),
                _Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
                _Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
                _Route("/openapi.json", self._openapi),
                _Route("/health", self._health),
                _Route("/ready", self._ready),
                _Route("/metrics", self._show_metrics),
                *(_Route(path, page.answer, include_in_schema=False) for path in PAGE_ROUTES if settings.page),
            ],
            middleware=[cors, requests] if settings.cors_origins else [requests],
            exception_handlers={HTTPException: _http_problem},
            lifespan=ModelServer.lifespan,
        )

    @asynccontextmanager
    async def lifespan(self, app: Starlette | None = None) -> AsyncIterator[None]:
        """Open the models that are not open, and close them at the end.

        If the server is mounted in another application, use this as that application's lifespan.
        """
        async with self.models.open():
            yield

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse(model_list(self.models.cards()))

    async def _show_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self.models.find(name)
        return JSONResponse(next(model_card(card) for card in self.models.cards() if card.id == name))

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document of the server."""
        described = (*(api.described for api in APIS), *OTHERS)
        return openapi_document(described, needs_key=bool(self.settings.api_keys))

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(self.openapi())

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=METRICS_TYPE)

    async def _health(self, request: Request) -> Response:
        failed = self.models.failed()
        if failed:  # a dead engine needs a restart of the process
            return JSONResponse({"status": "failed", "models": failed}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        if self.drain.has_begun:
            return JSONResponse({"status": "ending"}, status_code=503)
        if not self.models.are_ready:
            return JSONResponse({"status": "loading"}, status_code=503)
        if failed := self.models.failed():
            return JSONResponse({"status": "failed", "models": failed}, status_code=503)
        return JSONResponse({"status": "ready"})


METRICS_TYPE: Final = "text/plain; version=0.0.4"


def create_app(models: Model | Mapping[str, ModelSource], settings: ServerSettings | None = None) -> ModelServer:
    """Create an application that serves models, to be run by an ASGI server or mounted in another application.

    :param models: a model, under its own name; or models by name, each open, or a function that opens it when the
        application starts, such as a builder's ``build``
    :param settings: None: the defaults of :class:`ServerSettings`
    :raises ConfigError: something that is not a model, or other settings
    """
    if not isinstance(settings, ServerSettings | None):
        raise ConfigError.of("settings", settings, "ServerSettings or None")
    named = {models.name: models} if isinstance(models, Model) else models
    return ModelServer(ServedModels(named), settings or ServerSettings())


def _meant(request: Request) -> str:
    """Return a question for a client whose base address lacks ``/v1`` or has it twice, for the text of an error."""
    root = request.scope.get("root_path", "")
    path = request.url.path.removeprefix(root)
    paths = {route.path for route in request.app.routes if isinstance(route, Route)}
    near = [each for each in (f"/v1{path}", path.removeprefix("/v1")) if each in paths]
    return f": is {root}{near[0]} meant?" if near else ""


async def _http_problem(request: Request, error: Exception) -> Response:
    """Answer requests with an unknown path or method."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = f"there is nothing at {request.url.path[:200]}{_meant(request)}"
    problem = Problem(status=error.status_code, message=message, headers=dict(error.headers or {}))
    return problem_response(request.scope, problem)

"""Make the application that serves models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paged_sdk import Model
from paged_sdk.server.answers import Answers
from paged_sdk.server.drain import Drain
from paged_sdk.server.errors import problem_response
from paged_sdk.server.front import Front
from paged_sdk.server.metrics import Metrics
from paged_sdk.server.served_models import ModelSource, ServedModels
from paged_sdk.server.settings import ServerSettings
from paged_sdk.wire.call import Call
from paged_sdk.wire.chat_completions import read_chat_completion
from paged_sdk.wire.completions import read_completion
from paged_sdk.wire.models import model_card, model_list
from paged_sdk.wire.problem import Problem

__all__ = ["ModelServer", "create_app"]

CALLS: Final[Mapping[str, Callable[[object], Call[Any, Any]]]] = {
    "/v1/chat/completions": read_chat_completion,
    "/v1/completions": read_completion,
}
"""Maps the paths of the APIs that generate text to what reads their bodies."""


class ModelServer(Starlette):
    """Is an ASGI application that serves models. Make one with :func:`create_app`.

    :ivar models: the models
    :ivar settings: how they are served
    :ivar drain: refuses new requests once it has begun
    """

    def __init__(self, models: ServedModels, settings: ServerSettings) -> None:
        self.models = models
        self.settings = settings
        self.drain: Drain = Drain()
        metrics = Metrics(models, self.drain)
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
        front = Middleware(Front, settings=settings, drain=self.drain, metrics=metrics)
        answers = partial(Answers, models=models, metrics=metrics, settings=settings)
        super().__init__(
            routes=[
                *(Route(path, answers(read=read).answer, methods=["POST"]) for path, read in CALLS.items()),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{model:path}", self._show_model),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", lambda request: Response(metrics.text(), media_type=METRICS_TYPE)),
            ],
            middleware=[cors, front] if settings.cors_origins else [front],
            exception_handlers={HTTPException: _http_problem},
            lifespan=ModelServer.lifespan,
        )

    @asynccontextmanager
    async def lifespan(self, app: Starlette | None = None) -> AsyncIterator[None]:
        """Open the models that are not open, and close them in the end.

        A server that is mounted needs it as the lifespan of the application that it is mounted in.
        """
        async with self.models.open():
            yield

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse(model_list(self.models.cards()))

    async def _show_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self.models.find(name)
        return JSONResponse(next(model_card(card) for card in self.models.cards() if card.id == name))

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        if self.drain.has_begun:
            return JSONResponse({"status": "ending"}, status_code=503)
        if not self.models.are_ready:
            return JSONResponse({"status": "loading"}, status_code=503)
        return JSONResponse({"status": "ready"})


METRICS_TYPE: Final = "text/plain; version=0.0.4"


def create_app(models: Model | Mapping[str, ModelSource], settings: ServerSettings | None = None) -> ModelServer:
    """Make an application that serves models: to run by an ASGI server, or to mount in another application.

    :param models: a model, which has its own name; or models by name, each open, or a function that opens it when the
        application starts, such as a builder's ``build``
    :param settings: None: those of :class:`ServerSettings`
    :raises ConfigError: something that is no model
    """
    named = {models.name: models} if isinstance(models, Model) else models
    return ModelServer(ServedModels(named), settings or ServerSettings())


async def _http_problem(request: Request, error: Exception) -> Response:
    """Answer requests that there is no path or method for."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = f"there is nothing at {request.url.path[:200]}"
    problem = Problem(status=error.status_code, message=message, headers=dict(error.headers or {}))
    return problem_response(request.scope, problem)

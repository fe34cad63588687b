"""A service that OpenAI's clients can talk to: one model for all requests, streams, timeouts, clients that hang up.

pip install fastapi uvicorn
python examples/fastapi_service.py [MODEL]
curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \
     -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64, "stream": true}'
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import anyio
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from paged_sdk import (
    ChatCompletionChunkResponse,
    ChatStream,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    Model,
    ModelClosedError,
    PagedError,
    QueueFullError,
    RequestBuilder,
    RequestTimeoutError,
    SamplingParams,
    TextModelBuilder,
    embedded_model_path,
)

T = TypeVar("T")


class ChatBody(BaseModel):
    """What a client may send. Anything else is refused, because a setting that is ignored is worse."""

    model_config = ConfigDict(extra="forbid")

    messages: list[dict[str, Any]]
    model: str = ""  # a label: the service has one model
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    prediction: dict[str, Any] | None = None  # {"type": "content", "content": ...}: what the answer will likely be
    stream: bool = False
    stream_options: dict[str, bool] | None = None  # the last chunk has the usage, asked for or not

    def request(self, timeout: float) -> RequestBuilder:
        """Return the request for the model.

        :raises PagedError: a value that cannot be used
        """
        sampling = SamplingParams(
            max_len=self.max_completion_tokens,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            stop=self.stop,
            seed=self.seed,
            n_choices=self.n,
            top_n_logprobs=self.top_logprobs if self.logprobs else None,
        )
        request = RequestBuilder.from_messages(self.messages).with_sampling(sampling).with_timeout(timeout)
        return request if self.prediction is None else request.with_prediction(self.prediction)


def create_app(load: Callable[[], AbstractAsyncContextManager[Model]], *, timeout: float = 60.0) -> FastAPI:
    """Make the service.

    :param load: opens the model when the service starts; it is closed when the service ends
    :param timeout: seconds that a request may take, waiting included
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with load() as app.state.model:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        model: Model = app.state.model
        stream = model.stream_chat_request(body.request(timeout))
        if not body.stream:
            response = await unless_client_leaves(request, stream.collect)
            return HUNG_UP if response is None else JSONResponse(response.to_dict())
        # What is wrong with a request shows before its first chunk, while there can still be a status.
        first = await unless_client_leaves(request, stream.__anext__)
        return HUNG_UP if first is None else StreamingResponse(events(first, stream), media_type="text/event-stream")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": app.state.model.name, "object": "model", "created": 0, "owned_by": "paged_sdk"}
        return {"object": "list", "data": [card]}

    @app.exception_handler(PagedError)
    async def failed(request: Request, error: PagedError) -> Response:
        status, _ = kind_of(error)
        headers = {"Retry-After": "1"} if status in (429, 503) else None
        return JSONResponse(error_body(error), status_code=status, headers=headers)

    return app


HUNG_UP = Response(status_code=499)
"""Nobody reads it; it stands in the access log."""


async def unless_client_leaves(request: Request, work: Callable[[], Awaitable[T]]) -> T | None:
    """Do something for a client; None if it hangs up meanwhile. What is canceled is ended in the model too."""
    result: T | None = None
    error: PagedError | None = None
    async with anyio.create_task_group() as tasks:

        async def cancel_when_client_leaves() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        tasks.start_soon(cancel_when_client_leaves)
        try:
            result = await work()
        except PagedError as exception:  # out of the task group as it is, not in an ExceptionGroup
            error = exception
        tasks.cancel_scope.cancel()
    if error is not None:
        raise error
    return result


async def events(first: ChatCompletionChunkResponse, stream: ChatStream) -> AsyncIterator[str]:
    """Give chunks as server-sent events. When the client hangs up this is canceled, which ends the request."""
    async with stream:
        yield f"data: {first.to_json()}\n\n"
        try:
            async for chunk in stream:
                yield f"data: {chunk.to_json()}\n\n"
        except PagedError as error:  # the status has been sent: clients look for this in the stream
            yield f"data: {json.dumps(error_body(error))}\n\n"
            return
        yield "data: [DONE]\n\n"


def kind_of(error: PagedError) -> tuple[int, str]:
    """Return the status that an error becomes, and what OpenAI's API calls it."""
    match error:
        case ContextLengthError():
            return 400, "context_length_exceeded"
        case InvalidRequestError() | ConfigError():
            return 400, "invalid_request_error"
        case QueueFullError():
            return 429, "rate_limit_exceeded"
        case RequestTimeoutError():
            return 504, "timeout"
        case ModelClosedError() | EngineDeadError():
            return 503, "unavailable"
        case _:
            return 500, "server_error"


def error_body(error: PagedError) -> dict[str, Any]:
    _, code = kind_of(error)
    return {"error": {"message": str(error), "type": type(error).__name__, "param": None, "code": code}}


def main(model_path: str | None = None) -> None:
    builder = TextModelBuilder(model_path or embedded_model_path()).with_logging().with_max_queue(64)
    uvicorn.run(create_app(builder.build), host="127.0.0.1", port=8000)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)

"""Offers a model to synchronous code, over an anyio portal."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Generic, ParamSpec, TypeAlias, TypeVar, Unpack

import anyio
from anyio.from_thread import BlockingPortal

from paged_sdk.calls.tool_loop import OnToolError, ToolRun
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.isq import IsqType
from paged_sdk.config.pooling import Pooling
from paged_sdk.config.sampling import GenerationDefaults, SamplingParams
from paged_sdk.errors import ConfigError, EngineError, ModelClosedError
from paged_sdk.model import Model
from paged_sdk.streaming import ResponseStream
from paged_sdk.system.owner import OfOneProcess, Owner, closed_model
from paged_sdk.system.threads import thread_must_start
from paged_sdk.types.adapter import AdapterInfo
from paged_sdk.types.embedding import EmbeddingResponse
from paged_sdk.types.prompt import PromptLike, PromptsLike
from paged_sdk.types.rank import RankResponse
from paged_sdk.types.request import ChatRequestLike
from paged_sdk.types.request_options import CompletionOptions, ReadingOptions
from paged_sdk.types.response import (
    ChatCompletionChunkResponse,
    ChatCompletionResponse,
    CompletionChunkResponse,
    CompletionResponse,
)
from paged_sdk.types.score import ScoreResponse
from paged_sdk.types.stats import ModelStats

__all__ = ["BlockingChatStream", "BlockingCompletionStream", "BlockingModel", "BlockingStream"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
InstanceT = TypeVar("InstanceT")
ResponseT = TypeVar("ResponseT")
ChunkT = TypeVar("ChunkT")
_Ended: TypeAlias = SystemExit | KeyboardInterrupt


class BlockingStream(OfOneProcess, Generic[ResponseT, ChunkT]):
    """Iterates over the chunks of one response; as a context manager it ends the request on exit."""

    def __init__(self, model: BlockingModel, stream: ResponseStream[ResponseT, ChunkT]) -> None:
        self._model = model
        self._stream = stream

    def __iter__(self) -> Iterator[ChunkT]:
        return self

    def __next__(self) -> ChunkT:
        try:
            return self._model._call(self._stream.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> BlockingStream[ResponseT, ChunkT]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the request if it has not ended."""
        with suppress(ModelClosedError):  # closing the model has ended the request
            self._model._run(self._stream.aclose)

    def collect(self) -> ResponseT:
        """Read the rest and return the whole response."""
        return self._model._call(self._stream.collect)

    def response_so_far(self) -> ResponseT:
        """Return a response of what has been read."""
        return self._stream.response_so_far()


BlockingChatStream: TypeAlias = BlockingStream[ChatCompletionResponse, ChatCompletionChunkResponse]
BlockingCompletionStream: TypeAlias = BlockingStream[CompletionResponse, CompletionChunkResponse]


class BlockingModel(OfOneProcess):
    """Wraps a :class:`Model` in blocking methods. Several threads may use it at once: their requests are batched.

    It runs an event loop in its own thread; every method does what the model's method of that name does. Logits
    processors run on the engine's thread, where blocking on the engine would deadlock: methods that wait for it, and
    :meth:`close`, raise :class:`EngineError` there.

    :param building: ``TextModelBuilder(...).build()``, or anything else that gives a model when awaited
    :raises ConfigError: it cannot be awaited
    :raises PagedError: as for building the model
    """

    def __init__(self, building: Awaitable[Model]) -> None:
        self._owner = Owner()
        self._portal, thread = _start_portal()
        try:
            self._model = _run(self._portal, partial(_await, building))
        except BaseException:
            _stop_portal(self._portal, thread)
            raise
        self._calls_this: ContextVar[bool] = ContextVar("calls_this", default=False)
        # Runs at close(), at garbage collection or at interpreter exit, whichever comes first, and once.
        self._finalizer = weakref.finalize(
            self, _close, self._owner, self._portal, thread, self._model, self._calls_this
        )

    @property
    def name(self) -> str:
        """Return the model's name, as in responses."""
        return self._model.name

    @property
    def model_type(self) -> str:
        """Return the checkpoint's family; see :attr:`Model.model_type`."""
        return self._model.model_type

    @property
    def architecture(self) -> str:
        """Return the decoder's family; see :attr:`Model.architecture`."""
        return self._model.architecture

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """Return the defaults of the checkpoint's generation_config.json; see :attr:`Model.generation_defaults`."""
        return self._model.generation_defaults

    @property
    def config(self) -> EngineConfig:
        """Return the engine's settings, defaults filled in."""
        return self._model.config

    @property
    def max_sequence_length(self) -> int:
        """Return the maximum number of tokens in a sequence, prompt and output together."""
        return self._model.max_sequence_length

    @property
    def takes_images(self) -> bool:
        """Tell whether messages may contain images."""
        return self._model.takes_images

    @property
    def generates_text(self) -> bool:
        """Tell whether it generates text. Embedding models and rerankers do not."""
        return self._model.generates_text

    @property
    def ranks_texts(self) -> bool:
        """Tell whether it is a reranker; see :meth:`Model.rank`."""
        return self._model.ranks_texts

    def send_chat_request(self, request: ChatRequestLike) -> ChatCompletionResponse:
        """Answer a conversation; see :meth:`Model.send_chat_request`."""
        return self._call(self._model.send_chat_request, request)

    def stream_chat_request(self, request: ChatRequestLike) -> BlockingChatStream:
        """Answer a conversation chunk by chunk; see :meth:`Model.stream_chat_request`."""
        return BlockingStream(self, self._model.stream_chat_request(request))

    def generate_structured(self, messages: ChatRequestLike, type_: type[InstanceT]) -> InstanceT:
        """Answer a conversation with an instance of a type. Parameters and errors are those of
        :meth:`Model.generate_structured`."""
        return self._call(self._model.generate_structured, messages, type_)

    def send_chat_requests(self, requests: Sequence[ChatRequestLike]) -> list[ChatCompletionResponse]:
        """Answer several conversations at once, in order; see :meth:`Model.send_chat_requests`."""
        return self._call(self._model.send_chat_requests, requests)

    def send_chat_with_tools(
        self,
        request: ChatRequestLike,
        *,
        max_rounds: int = 8,
        on_error: OnToolError = "tell",
        tool_timeout: float | None = None,
    ) -> ToolRun:
        """Answer a conversation, running the tools that the model calls; see :meth:`Model.send_chat_with_tools`. Async
        functions run in this object's event loop, in its own thread.
        """
        return self._call(
            self._model.send_chat_with_tools,
            request,
            max_rounds=max_rounds,
            on_error=on_error,
            tool_timeout=tool_timeout,
        )

    def send_completion_request(
        self, prompt: PromptsLike, sampling: SamplingParams | None = None, **options: Unpack[CompletionOptions]
    ) -> CompletionResponse:
        """Continue a text, without a chat template; see :meth:`Model.send_completion_request`."""
        return self._call(self._model.send_completion_request, prompt, sampling, **options)

    def stream_completion_request(
        self, prompt: PromptsLike, sampling: SamplingParams | None = None, **options: Unpack[CompletionOptions]
    ) -> BlockingCompletionStream:
        """Continue a text chunk by chunk; see :meth:`Model.stream_completion_request`."""
        return BlockingStream(self, self._model.stream_completion_request(prompt, sampling, **options))

    def embed(
        self,
        texts: PromptsLike,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncation: bool = False,
        **options: Unpack[ReadingOptions],
    ) -> EmbeddingResponse:
        """Return an embedding of each text; see :meth:`Model.embed`."""
        return self._call(
            self._model.embed,
            texts,
            pooling=pooling,
            normalize=normalize,
            dimensions=dimensions,
            prompt_name=prompt_name,
            truncation=truncation,
            **options,
        )

    def score(
        self, texts: PromptsLike, *, prefix: PromptLike | None = None, **options: Unpack[ReadingOptions]
    ) -> ScoreResponse:
        """Return how likely texts are; see :meth:`Model.score`."""
        return self._call(self._model.score, texts, prefix=prefix, **options)

    def rank(
        self, query: str, documents: Sequence[str], *, truncation: bool = False, **options: Unpack[ReadingOptions]
    ) -> RankResponse:
        """Sort documents by their relevance to a query; see :meth:`Model.rank`."""
        return self._call(self._model.rank, query, documents, truncation=truncation, **options)

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text."""
        return self._run(self._model.tokenize, text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        :raises InvalidRequestError: an id outside the vocabulary
        """
        return self._run(self._model.detokenize, token_ids, skip_special_tokens=skip_special_tokens)

    def count_tokens(self, request: ChatRequestLike) -> int:
        """Return the number of prompt tokens of a chat request: see :meth:`Model.count_tokens`."""
        return self._run(self._model.count_tokens, request)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep their KV."""
        self._call(self._model.reset_prefix_cache)

    def re_isq_model(self, isq: IsqType) -> None:
        """Quantize the weights to another type; see :meth:`Model.re_isq_model`."""
        self._call(self._model.re_isq_model, isq)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of the loaded adapters."""
        return self._model.adapters

    @property
    def adapter_infos(self) -> tuple[AdapterInfo, ...]:
        """Return the loaded adapters' names, content digests, ranks and sizes."""
        return self._model.adapter_infos

    def load_adapter(self, path: str | PathLike[str], *, name: str | None = None) -> None:
        """Load another adapter; see :meth:`Model.load_adapter`."""
        self._call(self._model.load_adapter, path, name=name)

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests of an adapter, and wait for running ones; see :meth:`Model.unload_adapter`."""
        self._call(self._model.unload_adapter, name)

    def check(self) -> None:
        """Raise the error that any request would get; return if the model can serve requests. For health checks.

        :raises ModelClosedError: it is closed
        :raises EngineDeadError: the engine stopped because of an exception
        """
        self._model.check()

    def stats(self) -> ModelStats:
        """Return a snapshot of the engine's state after its last step."""
        return self._model.stats()

    def close(self) -> None:
        """Close the model as :meth:`Model.aclose` does, and end the event loop's thread. Idempotent.

        It may be called from a tool that the model has called; the thread then ends after the tool.
        """
        if self._finalizer.alive:
            self._check_thread()
        self._finalizer()

    def __enter__(self) -> BlockingModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, function: Callable[_P, Awaitable[_T]], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a method that waits for the engine."""
        self._check_thread()
        return self._run(function, *args, **kwargs)

    def _check_thread(self) -> None:
        if _is_engine_thread(self._model):
            raise EngineError("the engine's own thread, on which logits processors run, cannot wait for the engine")

    def _run(self, function: Callable[_P, Awaitable[_T]], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self._owner.check()
        if not self._finalizer.alive:
            raise closed_model()
        return _run(self._portal, partial(_marked, self._calls_this, partial(function, *args, **kwargs)))


def _run(portal: BlockingPortal, function: Callable[[], Awaitable[_T]]) -> _T:
    """Run a function as a task of the portal, and wait for its result."""
    future: Future[_T | _Ended] = portal.start_task_soon(_caught, function)
    try:
        result = future.result()
    except BaseException:
        # Ctrl-C while waiting: the result is not needed, so cancel the task. This has no effect if the task has ended.
        future.cancel()
        raise
    if isinstance(result, _Ended):
        raise result
    return result


async def _caught(function: Callable[[], Awaitable[_T]]) -> _T | _Ended:
    try:
        return await function()
    except (SystemExit, KeyboardInterrupt) as ended:  # raised in the caller's thread: here it would end the event loop
        return ended


async def _marked(calls_this: ContextVar[bool], function: Callable[[], Awaitable[_T]]) -> _T:
    """Run a function, and mark its context, which helper threads inherit, as part of a call of the model."""
    calls_this.set(True)
    return await function()


async def _await(building: Awaitable[Model]) -> Model:
    if not isinstance(building, Awaitable):
        raise ConfigError.of("building", building, "a builder's build(), such as TextModelBuilder(...).build()")
    return await building


def _start_portal() -> tuple[BlockingPortal, threading.Thread]:
    """Start an event loop in a daemon thread. anyio's own portal thread would keep an interpreter from exiting if a
    model was not closed.
    """
    started: Future[BlockingPortal] = Future()

    async def serve() -> None:
        async with BlockingPortal() as portal:
            if started.set_running_or_notify_cancel():
                started.set_result(portal)
                await portal.sleep_until_stopped()

    thread = threading.Thread(target=anyio.run, args=(serve,), name="paged-sdk-portal", daemon=True)
    with thread_must_start("for the model's event loop"):
        thread.start()
    try:
        while True:
            try:
                return started.result(timeout=1), thread
            except FutureTimeoutError:
                if not thread.is_alive():  # it ended before it could report, out of memory or file descriptors
                    raise EngineError("the thread of the model's event loop has ended as it began") from None
    except BaseException:
        if not started.cancel():  # Ctrl-C while waiting, but the portal has started
            _stop_portal(started.result(), thread)
        raise


def _stop_portal(portal: BlockingPortal, thread: threading.Thread) -> None:
    portal.call(portal.stop)
    thread.join()


def _close(
    owner: Owner, portal: BlockingPortal, thread: threading.Thread, model: Model, calls_this: ContextVar[bool]
) -> None:
    if not owner.is_here:  # in a forked child, the portal's thread does not exist
        return
    # If the garbage collector runs this on one of the threads to end, that thread cannot wait for itself.
    if threading.current_thread() is thread or _is_engine_thread(model):
        threading.Thread(target=_close, args=(owner, portal, thread, model, calls_this), daemon=True).start()
        return
    try:
        portal.call(model.aclose)
    finally:
        if calls_this.get():  # called from a tool: the portal's thread waits for this thread
            portal.call(portal.stop)
        else:
            _stop_portal(portal, thread)


def _is_engine_thread(model: Model) -> bool:
    return model._insides.worker.is_this_thread

"""Defines a loaded model, as an application uses it."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from os import PathLike
from types import TracebackType
from typing import TypeVar, Unpack

import anyio

from paged_sdk.build.parts import ModelParts
from paged_sdk.calls.embedder import Embedder
from paged_sdk.calls.generation_requests import ChatStream, CompletionStream, GenerationRequests
from paged_sdk.calls.pin import Pin, Pins
from paged_sdk.calls.preparation import in_thread
from paged_sdk.calls.ranker import Ranker
from paged_sdk.calls.reading_requests import ReadingRequests, check_flag
from paged_sdk.calls.scorer import Scorer
from paged_sdk.calls.structured import Structure
from paged_sdk.calls.tool_loop import OnToolError, ToolRun, run_tools
from paged_sdk.chat.renderer import Interruption
from paged_sdk.config.isq import IsqType
from paged_sdk.config.pooling import Pooling
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.conversation import Conversation
from paged_sdk.errors import ConfigError, InvalidRequestError
from paged_sdk.model_facts import ModelFacts
from paged_sdk.model_insides import ModelInsides
from paged_sdk.streaming import collect_all
from paged_sdk.system.threads import in_own_thread
from paged_sdk.types.embedding import EmbeddingResponse
from paged_sdk.types.messages import MessageLike, TextMessages
from paged_sdk.types.prompt import PromptLike, PromptsLike, as_prompts
from paged_sdk.types.rank import RankResponse
from paged_sdk.types.request import ChatRequestLike, as_request
from paged_sdk.types.request_options import (
    CompletionOptions,
    ReadingOptions,
    RequestOptions,
    completion_options,
    reading_options,
)
from paged_sdk.types.response import (
    ChatCompletionResponse,
    CompletionResponse,
)
from paged_sdk.types.score import ScoreResponse
from paged_sdk.types.stats import ModelStats
from paged_sdk.types.tool import ToolLike
from paged_sdk.worker.engine_access import EngineAccess

__all__ = ["ChatStream", "CompletionStream", "Model"]

InstanceT = TypeVar("InstanceT")

JOIN_SECONDS = 30.0
"""Longest time that closing waits for the worker: a step takes milliseconds, a long prefill chunk on a CPU a few
seconds."""


class Model(ModelFacts):
    """Holds a model and the worker thread that runs it. Build one with ``await TextModelBuilder(...).build()``.

    Every method may be used from any number of tasks, event loops (asyncio and trio) and threads at once; their
    requests are batched. Cancelling a task that awaits a response ends the request.
    """

    def __init__(self, parts: ModelParts) -> None:
        self._set_up(ModelInsides.of(parts))

    def _set_up(self, insides: ModelInsides) -> None:
        self._insides = insides
        self._preparer = insides.preparer
        self._worker = worker = insides.worker
        self._adapters = insides.adapters
        self._generation = GenerationRequests(worker, insides.preparer, insides.adapters, insides.name)
        self._pins = Pins(worker, insides.preparer, insides.adapters)
        reader = ReadingRequests(worker, insides.preparer, insides.adapters)
        self._embedder = Embedder(reader, recipe=insides.recipe, hidden_size=insides.hidden_size, model=insides.name)
        self._scorer = Scorer(reader, insides.name)
        self._ranker = Ranker(reader, insides.recipe, insides.name)
        # Garbage collection and interpreter exit end the thread too; the worker holds no reference to the model.
        self._finalizer = weakref.finalize(self, _end, worker)

    async def send_chat_request(self, request: ChatRequestLike) -> ChatCompletionResponse:
        """Answer a conversation.

        :param request: ``TextMessages``, ``RequestBuilder`` or a list of ``{"role": ..., "content": ...}``; bare
            messages are answered greedily
        :raises InvalidRequestError: a malformed request, or one that the chat template refuses
        :raises ContextLengthError: the prompt can never fit
        :raises RequestError: any other error of :class:`ResponseStream`
        """
        return await self.stream_chat_request(request).collect()

    def stream_chat_request(self, request: ChatRequestLike) -> ChatStream:
        """Answer a conversation chunk by chunk:
        ``async with model.stream_chat_request(...) as stream: async for chunk in stream``.

        :raises InvalidRequestError: a malformed request
        """
        return self._generation.chat(as_request(request))

    async def generate_structured(self, messages: ChatRequestLike, type_: type[InstanceT]) -> InstanceT:
        """Answer a conversation with an instance of a type: an attrs class, a dataclass, a TypedDict or a pydantic
        model. The model is not told about the type: describe it in the messages.

        :param messages: as for :meth:`send_chat_request`
        :raises InvalidRequestError: a request with a constraint, or with several choices
        :raises ConstraintError: JSON cannot express the type, or its schema cannot be enforced; or the answer was cut
            off, or rejected by a validator of the type: ``partial_response`` then holds it
        :raises ModelClosedError: the model is closed, or was closed meanwhile
        :raises RequestError: as for :meth:`send_chat_request`
        """
        structure = Structure.of(type_)
        return structure.read(await self.send_chat_request(structure.asked(as_request(messages))))

    async def send_chat_requests(self, requests: Sequence[ChatRequestLike]) -> list[ChatCompletionResponse]:
        """Answer several conversations at once, in order. The first error ends them all and is raised.

        :raises RequestError: as for :meth:`send_chat_request`
        """
        if isinstance(requests, str | bytes) or not isinstance(requests, Sequence):
            raise InvalidRequestError.of("requests", requests, "a list of requests")
        return await collect_all([self.stream_chat_request(request) for request in requests])

    async def send_chat_with_tools(
        self,
        request: ChatRequestLike,
        *,
        max_rounds: int = 8,
        on_error: OnToolError = "tell",
        tool_timeout: float | None = None,
    ) -> ToolRun:
        """Answer a conversation, running the tools that the model calls, until it answers without a call.

        The calls of one answer run concurrently: async functions in this event loop, others in a thread each. Their
        results go back to the model, texts as they are and other values as JSON.

        :param request: has its tools from :meth:`RequestBuilder.with_tools`, each with a function. If it requires a
            call, only the first answer has to make one. Without tools, the answer is that of :meth:`send_chat_request`
        :param max_rounds: the maximum number of rounds of calls
        :param on_error: what happens if a tool raises or its arguments do not fit its annotations: "tell" reports it to
            the model, "raise" ends the run
        :param tool_timeout: the maximum number of seconds per call. A call that takes longer counts as an exception; a
            function in a thread keeps running, but is no longer waited for
        :raises InvalidRequestError: a tool without a function, or several choices
        :raises ToolError: a tool raised an exception, and ``on_error`` is "raise"
        :raises ToolRoundsError: the model called tools again after ``max_rounds`` rounds
        :raises RequestError: as for :meth:`send_chat_request`
        """
        return await run_tools(
            self.send_chat_request,
            as_request(request),
            max_rounds=max_rounds,
            on_error=on_error,
            tool_timeout=tool_timeout,
        )

    async def send_completion_request(
        self, prompt: PromptsLike, sampling: SamplingParams | None = None, **options: Unpack[CompletionOptions]
    ) -> CompletionResponse:
        """Continue a text, without a chat template.

        :param prompt: a text or token ids; or a list of prompts, which are continued at once: the response has the
            choices of the first prompt, then those of the second, and so on
        :param sampling: how to sample; None is greedy
        :param options: ``priority``, ``timeout``, ``cache_salt``, ``truncation``, ``logits_processors``,
            ``prediction``, ``constraint`` and ``adapter``: see :class:`CompletionOptions`
        :raises InvalidRequestError: an empty prompt, or token ids outside the vocabulary
        :raises ContextLengthError: a prompt can never fit
        """
        return await self.stream_completion_request(prompt, sampling, **options).collect()

    def stream_completion_request(
        self, prompt: PromptsLike, sampling: SamplingParams | None = None, **options: Unpack[CompletionOptions]
    ) -> CompletionStream:
        """Continue a text chunk by chunk, without a chat template. Parameters and errors are those of
        :meth:`send_completion_request`."""
        return self._generation.completion(as_prompts(prompt), completion_options(sampling, options))

    async def embed(
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
        """Return an embedding of each text, pooled from the hidden states after the last norm as the checkpoint says.
        If it says nothing, that is the last token's state (for an encoder, the mean of all), normalized.

        :param texts: a text or token ids; or a list of them. Texts get the special tokens that the tokenizer adds;
            token ids are used as they are
        :param pooling: "last", "mean", "cls", "max" or "weighted_mean", instead of the checkpoint's
        :param normalize: whether embeddings have length 1; None: as the checkpoint says
        :param dimensions: keep only this many leading numbers of each embedding, and normalize these again if
            embeddings are normalized; for models trained for that (Matryoshka)
        :param prompt_name: which of the checkpoint's prompts to put before each text; None: its default, usually none
        :param truncation: cut a text that is too long at its end instead of refusing it
        :param options: ``priority``, ``timeout``, ``cache_salt`` and ``adapter``: see :class:`ReadingOptions`
        :raises InvalidRequestError: an empty text, token ids outside the vocabulary, or an invalid argument
        :raises ContextLengthError: a text is too long
        :raises QueueFullError: too many requests are waiting; the later texts of a long list do not count
        :raises NumericalError: NaN or Inf in hidden states
        :raises RequestTimeoutError: the timeout has passed
        :raises EngineDeadError: the engine stopped
        """
        prompts, checked = as_prompts(texts, "texts"), reading_options(options)
        self._note_embedding(prompts, checked)
        return await self._embedder.embed(
            prompts,
            request_id=f"embd-{uuid.uuid4().hex}",
            pooling=pooling,
            normalize=normalize,
            dimensions=dimensions,
            prompt_name=prompt_name,
            truncation=truncation,
            options=checked,
        )

    async def score(
        self, texts: PromptsLike, *, prefix: PromptLike | None = None, **options: Unpack[ReadingOptions]
    ) -> ScoreResponse:
        """Return how likely texts are: each token's log-probability, their sum, the perplexity, and whether greedy
        sampling would generate the text.

        With a prefix, each text is scored as its continuation, and only the text's own tokens count; the prefix is
        computed once, as far as the prefix cache can hold it. Logits are made for a few tokens at a time, however long
        the texts are.

        :param texts: a text or token ids; or a list of them
        :param prefix: what comes before each text; None: what the tokenizer puts before a text. If that is nothing, the
            first token of each text has no score
        :param options: ``priority``, ``timeout``, ``cache_salt`` and ``adapter``: see :class:`ReadingOptions`
        :raises InvalidRequestError: an empty text, token ids outside the vocabulary, or an invalid argument
        :raises ContextLengthError: a text is too long, together with the prefix
        :raises RequestError: as for :meth:`embed`
        """
        prompts, checked = as_prompts(texts, "texts"), reading_options(options)
        request_id = f"score-{uuid.uuid4().hex}"
        self._note_scoring(request_id, len(prompts), prefix, checked)
        return await self._scorer.score(prompts, prefix, checked, request_id)

    async def rank(
        self, query: str, documents: Sequence[str], *, truncation: bool = False, **options: Unpack[ReadingOptions]
    ) -> RankResponse:
        """Sort documents by their relevance to a query. A reranker reads each document together with the query, in the
        form that its checkpoint or chat template defines, and computes one number for the pair.

        :param documents: at least one text
        :param truncation: cut a document that is too long at its end instead of refusing it
        :param options: ``priority``, ``timeout``, ``cache_salt`` and ``adapter``: see :class:`ReadingOptions`
        :raises InvalidRequestError: the model is not a reranker, a text is empty, or an argument is invalid
        :raises ContextLengthError: a document is too long together with the query, or the query leaves no room for one
        :raises RequestError: as for :meth:`embed`
        """
        checked = reading_options(options)
        return await self._ranker.rank(query, documents, checked, f"rank-{uuid.uuid4().hex}", truncation=truncation)

    def fork(
        self,
        messages: TextMessages | Sequence[MessageLike],
        *,
        sampling: SamplingParams | None = None,
        tools: Iterable[ToolLike] = (),
        max_rounds: int = 8,
        tool_timeout: float | None = None,
    ) -> Conversation:
        """Begin a conversation with turns that are given. Conversations that begin with the same turns share their KV;
        :meth:`pin` keeps it in memory, however much else is computed.

        :param messages: a system message, earlier turns, or both; they may contain images
        :param sampling: see :class:`Conversation`, also for the other parameters
        :raises InvalidRequestError: a malformed message or tool, or a RequestBuilder, whose options are of one request
        """
        return Conversation(
            self, messages=messages, sampling=sampling, tools=tools, max_rounds=max_rounds, tool_timeout=tool_timeout
        )

    async def pin(self, messages: ChatRequestLike) -> Pin:
        """Hold the KV of a chat's prefix, such as a system prompt or a document, until it is released: requests that
        begin with these messages find it, however much else is computed meanwhile. What is missing of it is computed
        now, like a prompt.

        It survives :meth:`reset_prefix_cache`. :meth:`re_isq_model` has it computed again with the new weights before
        later requests, and so has a NaN in a request that shares it. The blocks that all pins hold together are
        limited: one sequence of ``max_model_len`` must fit beside them, or they take at most half of the pool, if that
        is more. In the latter case a single request that needs the other half and more takes their memory for as long
        as it runs; they are computed again afterwards.

        :param messages: as for :meth:`send_chat_request`. Of a RequestBuilder's options, those count that the prompt's
            KV depends on (tools, adapter, cache salt, and what the chat template sees), and priority and timeout
        :returns: an async context manager, which releases the prefix on exit
        :raises InvalidRequestError: a malformed request, or a model without paged attention, without prefix cache or
            with recurrent layers
        :raises PinLimitError: too much of the pool would be pinned
        :raises ContextLengthError: the prefix does not fit
        :raises RequestError: as for :meth:`embed`
        """
        return await self._pins.pin(as_request(messages))

    async def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text.

        :raises InvalidRequestError: not a text, or one with lone surrogates
        """
        check_flag("add_special_tokens", add_special_tokens)
        if not isinstance(text, str):
            raise InvalidRequestError.of("text", text, "a text")
        tokenizer = self._preparer.text.tokenizer
        return await in_thread(partial(tokenizer.encode, text, add_special_tokens=add_special_tokens))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        :raises InvalidRequestError: an id outside the vocabulary
        """
        check_flag("skip_special_tokens", skip_special_tokens)
        checked = list(self._preparer.check_token_ids("token_ids", token_ids))
        tokenizer = self._preparer.text.tokenizer
        return await in_thread(partial(tokenizer.decode, checked, skip_special_tokens=skip_special_tokens))

    async def count_tokens(self, request: ChatRequestLike) -> int:
        """Return the number of prompt tokens of a chat request, including its tools, images and chat template.

        :raises InvalidRequestError: a malformed request, or one that the chat template refuses
        """
        built = as_request(request)
        interruption = Interruption()
        try:
            prompt = await in_thread(partial(self._preparer.encode_chat, built.messages, built.options, interruption))
        except BaseException:  # cancelled: the thread must stop
            interruption.set()
            raise
        return len(prompt.token_ids)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes but the pinned ones; running requests keep their KV."""
        await self._worker.reset_prefix_cache()

    async def re_isq_model(self, isq: IsqType) -> None:
        """Quantize the weights to another type, reading them again from the model's files, which must be unchanged.

        Running requests finish first, and new ones wait. Cached prefixes are forgotten, and pinned ones computed again.
        Layers are replaced one after the other, which takes a few layers' memory more than the larger of the two
        models. Layers with a type in the topology and draft models stay as they are. Cancelling the call before the
        work has begun prevents it; later, the work completes.

        :raises ConfigError: not an :class:`IsqType`, or one that the device has no kernels for
        :raises ModelLoadError: the files are missing or have changed, or a weight cannot be quantized: the model
            continues with its old weights
        :raises EngineDeadError: that failed too, and so will all requests
        :raises ModelClosedError: the model is closed, or was closed meanwhile
        """
        if not isinstance(isq, IsqType):
            raise ConfigError.of("isq", isq, "an IsqType")
        if self._insides.check_isq is not None:
            self._insides.check_isq(isq)
        await self._worker.requantize(isq)

    async def load_adapter(self, path: str | PathLike[str], *, name: str | None = None) -> None:
        """Load another adapter; running requests are not affected.

        :param path: a directory with ``adapter_config.json`` and ``adapter_model.safetensors``, a GGUF file, or a Hub
            id
        :param name: its name for :meth:`RequestBuilder.with_adapter`; None: the last part of the path, without
            ``.gguf``
        :raises ConfigError: another adapter has that name
        :raises AdapterError: it cannot be read, or was made for another model
        """
        await self._adapters.load(path, name)

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests of an adapter, release its pins, wait for running requests, and free its memory.

        Calls of :meth:`embed`, :meth:`score` and :meth:`rank` queue a few texts at a time: those that are not through
        end with an :class:`InvalidRequestError`.

        :raises ConfigError: no loaded adapter has that name
        """
        await self._adapters.unload(name)

    def check(self) -> None:
        """Raise the error that any request would get; return if the model can serve requests. For health checks.

        :raises ModelClosedError: it is closed
        :raises EngineDeadError: the engine stopped because of an exception
        """
        self._worker.check()

    @property
    def replicas(self) -> tuple[Model, ...]:
        """Return the models of a :class:`ReplicaSet`; for any other model, that model alone."""
        return (self,)

    def stats(self) -> ModelStats:
        """Return a snapshot of the engine's state after its last step."""
        return self._worker.stats

    async def aclose(self, *, drain: bool = False) -> None:
        """Refuse new requests, end running ones and join the worker thread. Idempotent.

        :param drain: let running requests finish first; otherwise they end now, with finish reason "canceled" and the
            text so far
        """
        self._worker.close(drain=drain)
        join = partial(self._worker.join, None if drain else JOIN_SECONDS)
        try:
            with anyio.CancelScope(shield=not drain):
                await in_own_thread(join, "to wait for the engine in", daemon=True)
        finally:
            self._preparer.text.close()

    async def __aenter__(self) -> Model:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _note_embedding(self, prompts: Sequence[PromptLike], options: RequestOptions) -> None:
        """Hook called before texts are embedded; a model for tests records them."""

    def _note_scoring(
        self, request_id: str, num_texts: int, prefix: PromptLike | None, options: RequestOptions
    ) -> None:
        """Hook called before texts are scored; a model for tests chooses their scores."""


def _end(worker: EngineAccess) -> None:
    worker.close()
    worker.join(JOIN_SECONDS)

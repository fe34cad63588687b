"""Offers a model to synchronous code, over an anyio portal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import TypeVar, Unpack

from paged_sdk.blocking_conversation import BlockingConversation
from paged_sdk.blocking_loop import BlockingLoop
from paged_sdk.blocking_pin import BlockingPin
from paged_sdk.blocking_stream import BlockingChatStream, BlockingCompletionStream, BlockingStream
from paged_sdk.calls.tool_loop import OnToolError, ToolRun
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.isq import IsqType
from paged_sdk.config.pooling import Pooling
from paged_sdk.config.sampling import GenerationDefaults, SamplingParams
from paged_sdk.types.adapter import AdapterInfo
from paged_sdk.types.embedding import EmbeddingResponse
from paged_sdk.types.messages import MessageLike, TextMessages
from paged_sdk.types.prompt import PromptLike, PromptsLike
from paged_sdk.types.rank import RankResponse
from paged_sdk.types.request import ChatRequestLike
from paged_sdk.types.request_options import CompletionOptions, ReadingOptions
from paged_sdk.types.response import ChatCompletionResponse, CompletionResponse
from paged_sdk.types.score import ScoreResponse
from paged_sdk.types.stats import ModelStats
from paged_sdk.types.tool import ToolLike

__all__ = ["BlockingModel"]

InstanceT = TypeVar("InstanceT")


class BlockingModel(BlockingLoop):
    """Wraps a :class:`Model` in blocking methods. Several threads may use it at once: their requests are batched.

    It runs an event loop in its own thread; every method does what the model's method of that name does. Logits
    processors run on the engine's thread, where blocking on the engine would deadlock: methods that wait for it, and
    :meth:`close`, raise :class:`EngineError` there.

    :param building: ``TextModelBuilder(...).build()``, or anything else that gives a model when awaited
    :raises ConfigError: it cannot be awaited
    :raises PagedError: as for building the model
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

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

    def fork(
        self,
        messages: TextMessages | Sequence[MessageLike],
        *,
        sampling: SamplingParams | None = None,
        tools: Iterable[ToolLike] = (),
        max_rounds: int = 8,
        tool_timeout: float | None = None,
    ) -> BlockingConversation:
        """Begin a conversation with turns that are given; see :meth:`Model.fork`."""
        return BlockingConversation(
            self, messages=messages, sampling=sampling, tools=tools, max_rounds=max_rounds, tool_timeout=tool_timeout
        )

    def pin(self, messages: ChatRequestLike) -> BlockingPin:
        """Hold the KV of a chat's prefix until it is released; see :meth:`Model.pin`."""
        return BlockingPin(self, self._call(self._model.pin, messages))

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
        """Forget all cached prefixes but the pinned ones; see :meth:`Model.reset_prefix_cache`."""
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

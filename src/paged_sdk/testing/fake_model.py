"""Defines a model that returns scripted texts."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, Unpack

from attrs import field, frozen

from paged_sdk.build.parts import ModelParts
from paged_sdk.config.embedding import EmbeddingRecipe
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.engine.engine import Engine
from paged_sdk.errors import ConfigError, NumericalError, RequestError
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.model import ChatStream, CompletionStream, Model
from paged_sdk.scheduler.request import Request
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.testing.byte_text import END, VOCAB_SIZE, byte_text
from paged_sdk.testing.fake_runner import FakeRunner
from paged_sdk.testing.next_token import ScriptedTokens
from paged_sdk.types.messages import Message
from paged_sdk.types.prompt import PromptLike, PromptsLike, as_prompts
from paged_sdk.types.request import ChatRequestLike, as_request
from paged_sdk.types.request_options import CompletionOptions, RequestOptions, completion_options

__all__ = ["FakeModel", "FakeRequest", "fake_model"]

BLOCK_SIZE = 32
NUM_BLOCKS = 4096
"""Room for 131,072 tokens: eight sequences of maximum length, or 32 of 4,096 tokens."""


@frozen(kw_only=True)
class FakeRequest:
    """Holds a request to a fake model.

    :ivar messages: the conversation; empty for a plain-text completion
    :ivar prompt: the text to complete or embed; None for a chat. A list of prompts is as many requests; scores of any
        number of texts are one, whose prompt is the prefix
    :ivar options: the request's other settings
    """

    messages: tuple[Message, ...] = ()
    prompt: PromptLike | None = None
    options: RequestOptions = field(factory=RequestOptions)

    @property
    def sampling(self) -> SamplingParams | None:
        """Return the request's sampling parameters; None is greedy."""
        return self.options.sampling


Reply: TypeAlias = str | Exception | Callable[[FakeRequest], str]
"""What a fake model returns: a text, an error to fail with, or a function of the request that returns a text."""


def fake_model(
    *texts: Reply,
    delay: float = 0.0,
    error: Exception | None = None,
    max_num_seqs: int = 32,
    max_queue: int = 4096,
    max_model_len: int = 16384,
) -> FakeModel:
    """Make a model for an application's tests, which needs no weights and no torch, and returns these texts::

        async with fake_model("Hello!", "Goodbye!") as model:
            response = await model.send_chat_request([{"role": "user", "content": "Hi!"}])
            assert response.choices[0].message.content == "Hello!"
            assert model.requests[0].messages[-1].content == "Hi!"

    It is a :class:`~paged_sdk.Model` with the real engine: it streams, batches requests, finds stop strings, counts
    usage, times out, cancels, refuses and closes like any model. Only the computation is fake. A token is one byte of
    UTF-8, so ``max_len=5`` is five bytes. Embeddings count a text's bytes by value, so similar texts have similar
    embeddings. A text's score is that of the continuation of the prefix, or of the text's first byte: a byte has
    probability one half where it equals the reply's, and almost none elsewhere; all texts of a call have the same
    reply.

    Requests take the texts in the order in which they are made, one per choice. When none is left, the last one is
    repeated. Sampling parameters are checked, but do not change the texts. As with any model, the number of tokens per
    chunk depends on how fast the stream is read; with a delay, it is one.

    As part of a :class:`~paged_sdk.ReplicaSet`, it only sees tokens: its requests then have the whole prompt as text.

    It can also be awaited like a builder's ``build()``, so ``BlockingModel(fake_model("Hello!"))`` is a fake for
    synchronous code. Models that are not closed end when they are garbage-collected.

    :param texts: the replies. An exception instead of a text fails its request, as ``error`` does. A function gets the
        :class:`FakeRequest` and returns the text, for tests that do not know the order of their requests
    :param delay: seconds before each token; all running requests get theirs at the same time. As with any model, a
        canceled request waits for the running step; closing the model does not
    :param error: what every request fails with after its text. A :class:`~paged_sdk.RequestError` or
        :class:`~paged_sdk.NumericalError` ends that request alone. Any other exception stops the engine, like a failing
        device: all requests get an :class:`~paged_sdk.EngineDeadError` from it
    :param max_num_seqs: texts generated at once; others wait
    :param max_queue: requests that may wait; further ones raise :class:`~paged_sdk.QueueFullError`
    :param max_model_len: bytes of prompt and text together
    :raises ConfigError: no text and no error, or an invalid value
    """
    for text in texts:
        if isinstance(text, str):
            _Line(text, error)  # raises if the text cannot be encoded
        elif not isinstance(text, Exception) and not callable(text):
            raise ConfigError.of("texts", text, "strings, exceptions, or functions of a request that return a string")
    if not texts and error is None:
        raise ConfigError.of("texts", texts, "at least one text, or an error")
    if error is not None and not isinstance(error, Exception):
        raise ConfigError.of("error", error, "an exception")
    config = EngineConfig(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_queue=max_queue,
        max_model_len=max_model_len,
        # A prompt takes one step whatever its length, so it takes one delay.
        max_num_batched_tokens=max_model_len + max_num_seqs,
    )
    return FakeModel(config, texts or ("",), delay=delay, error=error)


class FakeModel(Model):
    """Returns scripted texts and records its requests. Make one with :func:`fake_model`."""

    def __init__(
        self, config: EngineConfig, replies: Sequence[Reply], *, delay: float, error: Exception | None
    ) -> None:
        self._script = _Script(tuple(replies), error)
        self._runner = _ScriptedRunner(delay, self._script)
        text = byte_text()
        kv = KvCacheManager(config.num_blocks, config.block_size, prefix_caching=True, sliding_window=None)
        super().__init__(
            ModelParts(
                name="fake",
                model_type="fake",
                architecture="fake",
                engine=Engine(Scheduler(config, kv), kv, self._runner, text.tokenizer),
                text=text,
                config=config,
                vocab_size=VOCAB_SIZE,
                hidden_size=VOCAB_SIZE,
                recipe=EmbeddingRecipe(pooling="mean"),
                max_sequence_tokens=kv.max_sequence_tokens,
            )
        )
        # Registered after the model's own finalizer, so it runs first: the other one waits for the thread.
        weakref.finalize(self, self._runner.hurry)

    @property
    def requests(self) -> tuple[FakeRequest, ...]:
        """Return the requests so far, in order, including canceled and failed ones."""
        return tuple(self._script.requests)

    def stream_chat_request(self, request: ChatRequestLike) -> ChatStream:
        built = as_request(request)
        stream = super().stream_chat_request(built)
        self._note(stream.request_id, FakeRequest(messages=built.messages, options=built.options))
        return stream

    def stream_completion_request(
        self, prompt: PromptsLike, sampling: SamplingParams | None = None, **options: Unpack[CompletionOptions]
    ) -> CompletionStream:
        stream = super().stream_completion_request(prompt, sampling, **options)
        checked = completion_options(sampling, options)
        for part_id, each in zip(stream.part_ids, as_prompts(prompt), strict=True):
            said = each if isinstance(each, str) else tuple(each)
            self._note(part_id, FakeRequest(prompt=said, options=checked))
        return stream

    async def aclose(self, *, drain: bool = False) -> None:
        if not drain:
            self._runner.hurry()
        await super().aclose(drain=drain)

    def __await__(self) -> Generator[None, None, FakeModel]:
        yield from ()
        return self

    async def __aenter__(self) -> FakeModel:
        return self

    def _note_embedding(self, prompts: Sequence[PromptLike], options: RequestOptions) -> None:
        for each in prompts:
            said = each if isinstance(each, str) else tuple(self._preparer.check_token_ids("texts", each))
            self._script.requests.append(FakeRequest(prompt=said, options=options))

    def _note_scoring(
        self, request_id: str, num_texts: int, prefix: PromptLike | None, options: RequestOptions
    ) -> None:
        before = "" if prefix is None else prefix
        said = before if isinstance(before, str) else tuple(self._preparer.check_token_ids("prefix", before))
        request = FakeRequest(prompt=said, options=options)
        self._script.requests.append(request)
        line = self._script.next_line(request)
        self._script.lines |= {f"{request_id}-{place}": [line] for place in range(num_texts)}

    def _note(self, request_id: str, request: FakeRequest) -> None:
        self._script.note(request_id, request)


class _Script:
    """Chooses the output of each request, and records the requests.

    :ivar requests: the requests so far, in order
    :ivar lines: the output of each choice, by request id
    """

    def __init__(self, replies: tuple[Reply, ...], error: Exception | None) -> None:
        self.requests: list[FakeRequest] = []
        self.lines: dict[str, list[_Line]] = {}
        self._replies = replies
        self._num_replies = 0
        self._error = error

    def note(self, request_id: str, request: FakeRequest) -> list[_Line]:
        """Record a request, and choose its output."""
        self.requests.append(request)
        num_choices = 1 if request.sampling is None else request.sampling.n_choices
        lines = self.lines[request_id] = [self.next_line(request) for _ in range(num_choices)]
        return lines

    def next_line(self, request: FakeRequest) -> _Line:
        """Return the next output; the last one again if none is left."""
        reply = self._replies[min(self._num_replies, len(self._replies) - 1)]
        self._num_replies += 1
        if isinstance(reply, Exception):
            return _Line("", reply)
        text = reply if isinstance(reply, str) else reply(request)
        if not isinstance(text, str):
            raise ConfigError.of("texts", text, "a function that returns a string")
        return _Line(text, self._error)


class _Line:
    """Holds the output of one choice, and the error that it ends with instead of an end token, if any."""

    def __init__(self, text: str, error: Exception | None) -> None:
        try:
            token_ids = text.encode()
        except UnicodeEncodeError:
            raise ConfigError.of("texts", text, "Unicode without lone surrogates") from None
        self.next_token = ScriptedTokens(token_ids, END)
        self.length = len(token_ids)
        self.error = error


class _ScriptedRunner(FakeRunner):
    """Generates the scripted output of each request. A request without a script came from a replica set, which passes
    tokens only: its output is chosen here.
    """

    def __init__(self, delay: float, script: _Script) -> None:
        super().__init__(ScriptedTokens((), END), vocab_size=VOCAB_SIZE, delay=delay)
        self._script = script

    def next_token(self, request: Request, prompt: Sequence[int], output: Sequence[int], choice_index: int) -> int:
        lines = self._script.lines.get(request.request_id)
        if lines is None:
            said = bytes(token for token in request.prompt_token_ids if token < 256).decode(errors="replace")
            lines = self._script.note(request.request_id, FakeRequest(prompt=said, options=request.options))
        line = lines[choice_index]
        if line.error is not None and len(output) >= line.length:
            raise _of_request(line.error, request.request_id)
        return line.next_token(prompt, output, choice_index)


def _of_request(error: Exception, request_id: str) -> Exception:
    """Return the error that ends a request: a copy, which gets the request's id and partial response. Any other
    exception is returned unchanged and stops the engine.
    """
    if not isinstance(error, RequestError | NumericalError):
        return error
    copied = copy.copy(error)
    copied.request_id = request_id
    return copied

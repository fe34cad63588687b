"""Maps OpenAI's completions API, for plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Required

from attrs import evolve, field, frozen

from paged_sdk import (
    CompletionChunkResponse,
    CompletionOptions,
    CompletionResponse,
    CompletionStream,
    InvalidRequestError,
    Model,
    SamplingParams,
    TextOffsets,
)
from paged_sdk.wire.body import BodyReader, Bounds
from paged_sdk.wire.call import event
from paged_sdk.wire.chat_completions import StreamOptions, chunk_events, includes_usage
from paged_sdk.wire.echo import Echo
from paged_sdk.wire.limits import NUM_PROMPTS, TokenIds
from paged_sdk.wire.problem import Problem, openai_error
from paged_sdk.wire.sampling import MAX_TOP_LOGPROBS, SamplingFields, constraint_of, read_sampling

__all__ = ["COMPLETION", "CompletionCall", "read_completion"]

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's default: a plain text has no natural end."""

NAMES: Final[Mapping[str, str]] = {"response_format": "grammar"}
"""Maps a field name of chat completions to that of this API, which has no response format."""


class CompletionBody(SamplingFields, total=False):
    """Describes the body of ``/v1/completions``."""

    model: Required[Annotated[str, "The name of a model or a loaded adapter."]]
    prompt: Required[
        Annotated[
            str | Annotated[list[str], NUM_PROMPTS] | TokenIds | Annotated[list[TokenIds], NUM_PROMPTS],
            "A text or token ids to continue, or several of them.",
        ]
    ]
    stream: Annotated[bool | None, "Whether to stream the text."]
    stream_options: StreamOptions | None
    logprobs: Annotated[
        int | None, Bounds(0, MAX_TOP_LOGPROBS), "How many of the likeliest tokens to return with each."
    ]
    echo: Annotated[bool | None, "Whether each text begins with its prompt, and logprobs with those of its tokens."]
    best_of: Annotated[Literal[1] | None, "texts are not ranked"]
    suffix: Annotated[None, "nothing is inserted"]


COMPLETION: Final = BodyReader(CompletionBody)


@frozen(kw_only=True)
class CompletionCall:
    """Holds a parsed request.

    :ivar options: the settings beside prompts and sampling
    :ivar echoed: the prompts, if each text begins with its prompt and no logprobs are returned
    :ivar echoes_logprobs: whether each text begins with its prompt, and the logprobs with those of the prompt
    :ivar label: the client's label for the end user
    :ivar names: see :attr:`~paged_sdk.wire.call.Call.names`
    """

    model: str
    prompt: str | list[str] | list[int] | list[list[int]]
    sampling: SamplingParams
    options: CompletionOptions
    echoed: tuple[str, ...] = ()
    echoes_logprobs: bool = False
    is_streamed: bool = False
    includes_usage: bool = False
    label: str | None = None
    names: Mapping[str, str] = NAMES

    def with_defaults(self, model: Model) -> CompletionCall:
        """Return the request itself: an answer repeats no field that may be unset."""
        return self

    def send(self, model: Model, *, adapter: str | None, timeout: float | None) -> CompletionStream:
        """Send the request to a model.

        :param adapter: the loaded adapter to use
        :param timeout: time limit in seconds
        :raises PagedError: the model refuses the request
        """
        options: CompletionOptions = {**self.options, "adapter": adapter, "timeout": timeout}
        return model.stream_completion_request(self.prompt, self.sampling, **options)

    async def collect(self, model: Model, *, adapter: str | None, timeout: float | None) -> CompletionResponse:
        """Send the request to a model and return the whole answer. The parameters are those of :meth:`send`.

        :raises PagedError: the model refuses the request, or fails
        """
        if not self.echoes_logprobs:
            return await self.send(model, adapter=adapter, timeout=timeout).collect()
        prompts = _prompts(self.prompt)
        names = ["prompt"] if len(prompts) == 1 else [f"prompt[{place}]" for place in range(len(prompts))]
        echoes = [await Echo.of(model, prompt, name) for prompt, name in zip(prompts, names, strict=True)]
        asked = evolve(self, prompt=[echo.token_ids for echo in echoes])
        answer = await asked.send(model, adapter=adapter, timeout=timeout).collect()
        each = self.sampling.n_choices
        choices = tuple(echoes[choice.index // each].before(choice) for choice in answer.choices)
        return evolve(answer, choices=choices, prompt_logprobs=None)

    def response(self, answer: CompletionResponse) -> dict[str, Any]:
        """Return a whole answer in the form of OpenAI's API."""
        body = {**answer.to_dict(), "model": self.model}
        for choice in body["choices"]:
            choice["text"] = self.echo(choice["index"]) + choice["text"]
            if self.echoes_logprobs:  # the first token has none: nothing precedes it
                choice["logprobs"]["token_logprobs"][0] = choice["logprobs"]["top_logprobs"][0] = None
        return body

    def writer(self) -> _TextWriter:
        """Return a writer of the answer's events."""
        return _TextWriter(self)

    def echo(self, index: int) -> str:
        """Return the prompt to prepend to a choice, or an empty string."""
        return self.echoed[index // self.sampling.n_choices] if self.echoed else ""


@frozen
class _TextWriter:
    """Writes an answer as chunks."""

    call: CompletionCall
    _begun: set[int] = field(factory=set)
    _offsets: dict[int, TextOffsets] = field(factory=dict)

    def begin(self, answer: CompletionResponse) -> str:
        return ""

    def chunk(self, chunk: CompletionChunkResponse) -> str:
        body = {**chunk.to_dict(), "model": self.call.model}
        for piece, choice in zip(chunk.choices, body["choices"], strict=True):
            if piece.logprobs is not None:
                offsets = self._offsets.setdefault(piece.index, TextOffsets())
                choice["logprobs"]["text_offset"] = offsets.take(piece.logprobs.content, piece.text)
            if choice["index"] not in self._begun:
                self._begun.add(choice["index"])
                choice["text"] = self.call.echo(choice["index"]) + choice["text"]
        return chunk_events(body, includes_usage=self.call.includes_usage)

    def end(self, answer: CompletionResponse) -> str:
        return "data: [DONE]\n\n"

    def failed(self, problem: Problem) -> str:
        return event(openai_error(problem))


def read_completion(value: object) -> CompletionCall:
    """Parse a body.

    :raises PagedError: the body is malformed, or asks for something unsupported
    """
    body = COMPLETION.read(value)
    is_streamed = body.get("stream") or False
    max_len, grammar = body.get("max_tokens"), body.get("grammar")
    constraint = None if grammar is None else constraint_of(grammar["type"], grammar["value"], field="grammar.type")
    echoes_logprobs = _echoes_logprobs(body)
    return CompletionCall(
        model=body["model"],
        prompt=body["prompt"],
        sampling=read_sampling(
            body,
            max_len=DEFAULT_MAX_TOKENS if max_len is None else max_len,
            top_n=body.get("logprobs"),
            prompt_logprobs=body.get("logprobs") if echoes_logprobs else None,
        ),
        options=CompletionOptions(
            cache_salt=body.get("cache_salt"),
            truncation=body.get("truncate_sequence") or False,
            constraint=constraint,
        ),
        echoed=() if echoes_logprobs else _echoed(body),
        echoes_logprobs=echoes_logprobs,
        is_streamed=is_streamed,
        includes_usage=includes_usage(body.get("stream_options"), is_streamed=is_streamed),
        label=body.get("user"),
    )


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    """Return one or several prompts as a list."""
    if isinstance(prompt, str):
        return [prompt]
    return [each for each in prompt if not isinstance(each, int)] or [
        [each for each in prompt if isinstance(each, int)]
    ]


def _echoes_logprobs(body: CompletionBody) -> bool:
    if not body.get("echo") or body.get("logprobs") is None:
        return False
    if body.get("stream"):
        raise InvalidRequestError.of("stream", True, "false beside echo and logprobs")
    if body.get("truncate_sequence"):
        raise InvalidRequestError.of("truncate_sequence", True, "false beside echo and logprobs")
    return True


def _echoed(body: CompletionBody) -> tuple[str, ...]:
    if not body.get("echo"):
        return ()
    prompts = _prompts(body["prompt"])
    texts = tuple(each for each in prompts if isinstance(each, str))
    if len(texts) != len(prompts):
        raise InvalidRequestError.of("echo", True, "false for a prompt of token ids without logprobs")
    return texts

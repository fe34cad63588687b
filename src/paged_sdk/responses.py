"""From engine events to responses: two shapes, chat and plain text, of the same parts."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from attrs import frozen

from paged_sdk.engine.events import RequestEvent
from paged_sdk.types.response import (
    ChatCompletionChunkResponse,
    ChatCompletionResponse,
    Choice,
    ChunkChoice,
    CompletionChoice,
    CompletionChunkChoice,
    CompletionChunkResponse,
    CompletionResponse,
    Delta,
    FinishReason,
    Logprobs,
    ResponseMessage,
    TokenLogprob,
    Usage,
)

__all__ = ["ChatShape", "CompletionShape", "Header", "ResponseParts", "ResponseShape"]

ResponseT_co = TypeVar("ResponseT_co", covariant=True)
ChunkT_co = TypeVar("ChunkT_co", covariant=True)


@frozen(kw_only=True)
class Header:
    """What every response of a request begins with.

    :ivar created: Unix time in seconds
    """

    id: str
    created: int
    model: str


class ResponseParts:
    """A response as it comes together, choice by choice."""

    def __init__(self, num_choices: int) -> None:
        self.texts: list[list[str]] = [[] for _ in range(num_choices)]
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in range(num_choices)]
        self.finish_reasons: list[FinishReason | None] = [None] * num_choices
        self.prompt_logprobs: Logprobs | None = None
        self.usage: Usage | None = None

    def add(self, event: RequestEvent) -> None:
        for delta in event.choices:
            self.texts[delta.index].append(delta.text)
            self.logprobs[delta.index].extend(delta.logprobs)
            self.finish_reasons[delta.index] = delta.finish_reason or self.finish_reasons[delta.index]
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        self.usage = event.usage or self.usage

    def choices(self) -> list[tuple[FinishReason, str, Logprobs | None]]:
        """Finish reason, text and logprobs of each choice; one that has not ended reads "canceled"."""
        return [
            (reason or "canceled", "".join(text), _logprobs(logprobs))
            for reason, text, logprobs in zip(self.finish_reasons, self.texts, self.logprobs, strict=True)
        ]

    def usage_so_far(self) -> Usage:
        return self.usage or Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0)


def _logprobs(content: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> Logprobs | None:
    return Logprobs(content=tuple(content)) if content else None


class ResponseShape(Protocol, Generic[ResponseT_co, ChunkT_co]):
    """How parts become a response, and an event a chunk."""

    def response(self, header: Header, parts: ResponseParts) -> ResponseT_co: ...

    def chunk(self, header: Header, event: RequestEvent) -> ChunkT_co: ...


class ChatShape:
    """Messages and deltas with a role."""

    def response(self, header: Header, parts: ResponseParts) -> ChatCompletionResponse:
        return ChatCompletionResponse(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=tuple(
                Choice(finish_reason=reason, index=index, message=ResponseMessage(content=text), logprobs=logprobs)
                for index, (reason, text, logprobs) in enumerate(parts.choices())
            ),
            usage=parts.usage_so_far(),
            prompt_logprobs=parts.prompt_logprobs,
        )

    def chunk(self, header: Header, event: RequestEvent) -> ChatCompletionChunkResponse:
        return ChatCompletionChunkResponse(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=tuple(
                ChunkChoice(
                    index=delta.index,
                    delta=Delta(content=delta.text),
                    finish_reason=delta.finish_reason,
                    logprobs=_logprobs(delta.logprobs),
                )
                for delta in event.choices
            ),
            usage=event.usage,
        )


class CompletionShape:
    """Plain text."""

    def response(self, header: Header, parts: ResponseParts) -> CompletionResponse:
        return CompletionResponse(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=tuple(
                CompletionChoice(finish_reason=reason, index=index, text=text, logprobs=logprobs)
                for index, (reason, text, logprobs) in enumerate(parts.choices())
            ),
            usage=parts.usage_so_far(),
            prompt_logprobs=parts.prompt_logprobs,
        )

    def chunk(self, header: Header, event: RequestEvent) -> CompletionChunkResponse:
        return CompletionChunkResponse(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=tuple(
                CompletionChunkChoice(
                    index=delta.index,
                    text=delta.text,
                    finish_reason=delta.finish_reason,
                    logprobs=_logprobs(delta.logprobs),
                )
                for delta in event.choices
            ),
            usage=event.usage,
        )

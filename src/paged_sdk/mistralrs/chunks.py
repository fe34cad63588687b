"""Holds chunks of streamed responses with mistral.rs's attributes, made from the SDK's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import frozen

import paged_sdk
from paged_sdk import Usage
from paged_sdk.mistralrs.logprobs import ResponseLogprob
from paged_sdk.mistralrs.responses import ToolCallResponse, called

__all__ = ["ChatCompletionChunkResponse", "ChunkChoice", "Delta", "chunks_of"]


@frozen(kw_only=True)
class Delta:
    """Holds what a chunk adds to an answer.

    :ivar content: the next part of the text, often empty
    :ivar tool_calls: completed calls; None: none
    :ivar reasoning_content: the next part of the reasoning; None: none
    """

    content: str | None
    role: str
    tool_calls: list[ToolCallResponse] | None = None
    reasoning_content: str | None = None


@frozen(kw_only=True)
class ChunkChoice:
    """Holds what a chunk adds to one choice; ``finish_reason`` is set in the choice's last one.

    :ivar logprobs: those of the chunk's token, if they were asked for
    :ivar stop_sequence: which of ``stop_seqs`` ended it, in the choice's last chunk
    """

    finish_reason: str | None
    index: int
    delta: Delta
    logprobs: ResponseLogprob | None
    stop_sequence: str | None = None


@frozen(kw_only=True)
class ChatCompletionChunkResponse:
    """Holds a chunk of a streamed chat response; the last one has ``usage``.

    :ivar adapter_generation: of the adapter used; None: none
    :ivar session_id: always None: there are no sessions here
    """

    id: str
    choices: list[ChunkChoice]
    created: int
    model: str
    system_fingerprint: str
    object: str
    usage: Usage | None = None
    adapter_generation: str | None = None
    session_id: None = None


def chunks_of(
    chunk: paged_sdk.ChatCompletionChunkResponse, *, adapter_generation: str | None, stops: Mapping[int, str | None]
) -> Iterator[ChatCompletionChunkResponse]:
    """Convert a chunk of the SDK's. A chunk with logprobs of several tokens becomes several chunks, because
    mistral.rs's have the logprobs of one token.

    The last chunk has the text and everything else.

    :param stops: stop string of each choice that ends in this chunk
    """
    count = max((_num_tokens(choice) for choice in chunk.choices), default=1)
    for before in reversed(range(count)):  # number of tokens in later chunks
        choices = [_choice(choice, before, stops) for choice in chunk.choices if before < _num_tokens(choice)]
        yield ChatCompletionChunkResponse(
            id=chunk.id,
            choices=choices,
            created=chunk.created,
            model=chunk.model,
            system_fingerprint=chunk.system_fingerprint,
            object=chunk.object,
            usage=None if before else chunk.usage,
            adapter_generation=adapter_generation,
        )


def _num_tokens(choice: paged_sdk.ChunkChoice) -> int:
    return 1 if choice.logprobs is None else max(1, len(choice.logprobs.content))


def _choice(choice: paged_sdk.ChunkChoice, before: int, stops: Mapping[int, str | None]) -> ChunkChoice:
    tokens = () if choice.logprobs is None else choice.logprobs.content
    logprobs = ResponseLogprob.of(tokens[-1 - before]) if tokens else None
    said = choice.delta
    if before:
        return ChunkChoice(
            finish_reason=None, index=choice.index, delta=Delta(content="", role=said.role), logprobs=logprobs
        )
    delta = Delta(
        content=said.content,
        role=said.role,
        tool_calls=called(said.tool_calls),
        reasoning_content=said.reasoning_content,
    )
    return ChunkChoice(
        finish_reason=choice.finish_reason,
        index=choice.index,
        delta=delta,
        logprobs=logprobs,
        stop_sequence=None if choice.finish_reason is None else stops.get(choice.index),
    )

"""Makes chat and completion responses from an engine's output."""

from __future__ import annotations

import secrets
import string
import time
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from attrs import define, frozen

from paged_sdk.calls.written_answer import WrittenAnswer
from paged_sdk.chat.answer import AnswerParser
from paged_sdk.chat.answer_pieces import AnswerPiece
from paged_sdk.chat.output_text import OutputText
from paged_sdk.chat.token_spans import TextTokens
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.engine.request_start import RequestStart
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.types.logprobs import Logprobs, TokenLogprob, TopLogprob
from paged_sdk.types.response import (
    CalledFunction,
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
    ResponseMessage,
    ToolCallDelta,
    ToolCallResponse,
    Usage,
)
from paged_sdk.worker.subscription import Subscription, UnreadChoice

__all__ = ["ChatShape", "ChoiceDelta", "CompletionShape", "Header", "ResponseParts", "ResponseShape"]

_ID_CHARACTERS = string.ascii_letters + string.digits

ResponseT_co = TypeVar("ResponseT_co", covariant=True)
ChunkT_co = TypeVar("ChunkT_co", covariant=True)


@frozen(kw_only=True)
class Header:
    """Holds the fields that all responses and chunks of a request share.

    :ivar created: Unix time in seconds
    """

    id: str
    created: int
    model: str


@define
class ChoiceDelta:
    """Holds new output of one choice: reasoning, then content, then calls. Not frozen, which would make construction
    four times as slow: one is made per token.

    :ivar finish_reason: set once, in the choice's last delta
    :ivar is_first: whether it is the choice's first delta
    :ivar reasoning: new reasoning text
    :ivar calls: the calls that are complete now
    :ivar call_deltas: the new parts of calls
    :ivar content_logprobs: logprobs of the content's tokens
    """

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    is_first: bool
    reasoning: str = ""
    calls: tuple[ToolCallResponse, ...] = ()
    call_deltas: tuple[ToolCallDelta, ...] = ()
    content_logprobs: Logprobs | None = None


@frozen
class ReadChoice:
    """Holds all of one choice that has been read; its finish reason is "canceled" if it has not ended."""

    finish_reason: FinishReason
    text: str
    logprobs: Logprobs | None
    reasoning: str
    calls: tuple[ToolCallResponse, ...]
    stop_string: str | None
    content_logprobs: Logprobs | None
    pieces: tuple[ChunkChoice, ...]


class ResponseParts:
    """Collects a response, choice by choice.

    :param tokenizer: detokenizes the tokens of logprobs
    :param texts: one detokenizer per choice, without any tokens yet
    :param parsers: one answer parser per choice; empty: the text is not parsed
    :param num_prompts: how many prompts there are, each with equally many choices
    :param sorts_logprobs: whether to find the logprobs of the content's tokens
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[OutputText],
        parsers: Sequence[AnswerParser] = (),
        *,
        num_prompts: int = 1,
        sorts_logprobs: bool = False,
    ) -> None:
        self.num_choices: int = len(texts)
        self.num_prompts: int = num_prompts
        self._tokenizer = tokenizer
        self._output_texts = texts
        self._parsers = parsers
        self._answers: list[WrittenAnswer] = [WrittenAnswer() for _ in texts]
        self._call_ids: list[dict[int, str]] = [{} for _ in texts]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in texts]
        self._sorts_logprobs = sorts_logprobs
        self._text_tokens: list[TextTokens[TokenLogprob] | None] = [None] * len(texts)
        self._finish_reasons: list[FinishReason | None] = [None] * len(texts)
        self._choices_per_prompt = len(texts) // num_prompts
        self._prompt_logprobs: dict[int, Logprobs] = {}  # by index of the prompt
        self.usage: Usage | None = None
        self._start: RequestStart | None = None
        self._num_tokens = 0
        self._read_at = 0.0

    def begin(self, start: RequestStart) -> None:
        """Record the request's start when it is submitted."""
        self._start, self._read_at = start, start.arrival

    def read(self, subscription: Subscription) -> list[list[ChoiceDelta]]:
        """Process the unread output.

        :returns: the new deltas, one list per chunk: at most one delta per choice and chunk, in order of index. Output
            of several steps that is read at once needs a second chunk if reasoning or content follows a call
        """
        chunks: list[list[ChoiceDelta]] = []
        self._read_at = time.monotonic()
        self._start = subscription.start or self._start
        for index, unread in enumerate(subscription.choices):
            output_text = self._output_texts[index]
            logprobs = self._take_logprobs(index, unread) if unread.logprobs else None
            text = output_text.push(unread.token_ids)
            self._num_tokens += len(unread.token_ids)
            unread.token_ids.clear()
            reason, unread.finish_reason = unread.finish_reason, None
            if reason is not None:
                text += output_text.flush()
                # The stop token counts as a completion token, but is not sent.
                self._num_tokens += reason == "stop" and not output_text.is_stopped
            deltas: list[ChoiceDelta] = []
            if self._parsers:
                deltas, text = self._take_apart(index, text, is_last=reason is not None), ""
                if reason == "stop" and self._answers[index].calls:
                    reason = "tool_calls"
            if text or (not deltas and (logprobs or reason)):
                tokens = self._text_tokens[index]
                of_text = tokens.take_next(len(text)) if text and tokens is not None else ()
                deltas.append(self._delta(index, text, of_text))
            if logprobs:
                deltas[0].logprobs = logprobs
            if reason:
                deltas[-1].finish_reason = self._finish_reasons[index] = reason
            for place, delta in enumerate(deltas):
                if place < len(chunks):
                    chunks[place].append(delta)
                else:
                    chunks.append([delta])
        for index, logprobs_of_prompt in subscription.prompt_logprobs.items():
            self._prompt_logprobs[index // self._choices_per_prompt] = self._as_logprobs(logprobs_of_prompt)
        subscription.prompt_logprobs.clear()
        self.usage = subscription.usage
        return chunks

    def prompt_logprobs(self, index: int) -> Logprobs | None:
        """Return the logprobs of a choice's prompt; None if they have not arrived or were not requested."""
        return self._prompt_logprobs.get(index // self._choices_per_prompt)

    @property
    def all_complete(self) -> bool:
        """Return whether every choice has ended by itself or by a limit of the request, and was read to its end."""
        return all(reason not in (None, "canceled") for reason in self._finish_reasons)

    def choices(self) -> list[ReadChoice]:
        """Return everything read of each choice."""
        return [
            ReadChoice(
                self._finish_reasons[index] or "canceled",
                answer.text,
                _logprobs(self._logprobs[index]),
                answer.reasoning,
                answer.calls,
                self._output_texts[index].stop_string,
                _logprobs(answer.tokens),
                answer.pieces(index),
            )
            for index, answer in enumerate(self._answers)
        ]

    def usage_so_far(self) -> Usage:
        """Return the usage up to the last read; zeros if the request was never submitted."""
        if self.usage is not None:
            return self.usage
        if self._start is None:
            return Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0)
        return self._start.usage(self._num_tokens, self._read_at)

    def _take_logprobs(self, index: int, unread: UnreadChoice) -> Logprobs:
        """Return the logprobs of a choice's next tokens, whose text has not been decoded yet."""
        logprobs = self._as_logprobs(unread.logprobs)
        unread.logprobs.clear()
        self._logprobs[index].extend(logprobs.content)
        if self._sorts_logprobs:
            tokens = self._text_tokens[index]
            if tokens is None:
                tokens = self._text_tokens[index] = TextTokens(self._output_texts[index].token_spans())
            tokens.add(unread.token_ids, logprobs.content)  # the stop token has logprobs, but no token id here
        return logprobs

    def _delta(
        self, index: int, text: str, tokens: Sequence[TokenLogprob], piece: AnswerPiece | None = None
    ) -> ChoiceDelta:
        """Return the next delta of a choice.

        :param tokens: logprobs of the text's tokens, if they are needed
        :param piece: the piece of the parsed answer that the text belongs to, if it was parsed
        """
        answer = self._answers[index]
        delta = ChoiceDelta(index, text, None, None, not answer.has_begun)
        if piece is not None:
            delta.reasoning = piece.reasoning
            if piece.call_parts or piece.calls:
                delta.calls, delta.call_deltas = self._take_calls(index, piece)
        if tokens:
            delta.content_logprobs = _logprobs(tokens)
        answer.add(delta.text, tokens, delta.reasoning, delta.calls, delta.call_deltas)
        return delta

    def _take_apart(self, index: int, text: str, *, is_last: bool) -> list[ChoiceDelta]:
        """Return the deltas of a choice's next text, parsed."""
        parser, tokens = self._parsers[index], self._text_tokens[index]
        return [
            self._delta(index, piece.content, () if tokens is None else tokens.take(piece.runs), piece)
            for piece in (parser.flush(text) if is_last else parser.push(text))
        ]

    def _take_calls(
        self, index: int, piece: AnswerPiece
    ) -> tuple[tuple[ToolCallResponse, ...], tuple[ToolCallDelta, ...]]:
        """Return the calls that are complete now, and one delta for each call with new parts."""
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        for part in piece.call_parts:
            arguments[part.index] = arguments.get(part.index, "") + part.arguments
            if part.name is not None:
                names[part.index] = part.name
        ids = self._call_ids[index]
        ids.update((place, _call_id()) for place in names)
        deltas = tuple(
            ToolCallDelta(index=place, arguments=text, id=ids[place], name=names[place])
            if place in names
            else ToolCallDelta(index=place, arguments=text)
            for place, text in arguments.items()
        )
        calls = tuple(
            ToolCallResponse(
                index=call.index,
                id=ids[call.index],
                function=CalledFunction(name=call.name, arguments=call.arguments),
            )
            for call in piece.calls
        )
        return calls, deltas

    def _as_logprobs(self, entries: Iterable[RawLogprobs]) -> Logprobs:
        return Logprobs(content=tuple(map(self._token_logprob, entries)))

    def _token_logprob(self, raw: RawLogprobs) -> TokenLogprob:
        token, data = self._text_and_bytes(raw.token_id)
        top = tuple(self._top_logprob(token_id, logprob) for token_id, logprob in raw.top)
        return TokenLogprob(token=token, token_id=raw.token_id, logprob=raw.logprob, bytes=data, top_logprobs=top)

    def _top_logprob(self, token_id: int, logprob: float) -> TopLogprob:
        token, data = self._text_and_bytes(token_id)
        return TopLogprob(token=token, token_id=token_id, logprob=logprob, bytes=data)

    def _text_and_bytes(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        data = self._tokenizer.token_bytes(token_id)
        return data.decode("utf-8", errors="replace"), tuple(data)


def _logprobs(tokens: Sequence[TokenLogprob]) -> Logprobs | None:
    return Logprobs(content=tuple(tokens)) if tokens else None


def _call_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


class ResponseShape(Protocol, Generic[ResponseT_co, ChunkT_co]):
    """Makes responses from parts, and chunks from deltas."""

    def response(self, header: Header, parts: ResponseParts) -> ResponseT_co: ...

    def chunk(self, header: Header, deltas: Sequence[ChoiceDelta], usage: Usage | None) -> ChunkT_co: ...


class ChatShape:
    """Makes chat responses: messages, and deltas with a role."""

    def response(self, header: Header, parts: ResponseParts) -> ChatCompletionResponse:
        return ChatCompletionResponse(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=tuple(
                Choice(
                    finish_reason=choice.finish_reason,
                    index=index,
                    message=ResponseMessage(
                        content=choice.text, tool_calls=choice.calls, reasoning_content=choice.reasoning or None
                    ),
                    logprobs=choice.logprobs,
                    stop_string=choice.stop_string,
                    content_logprobs=choice.content_logprobs,
                    pieces=choice.pieces,
                )
                for index, choice in enumerate(parts.choices())
            ),
            usage=parts.usage_so_far(),
            prompt_logprobs=parts.prompt_logprobs(0),
        )

    def chunk(self, header: Header, deltas: Sequence[ChoiceDelta], usage: Usage | None) -> ChatCompletionChunkResponse:
        return ChatCompletionChunkResponse(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=tuple(
                ChunkChoice(
                    index=delta.index,
                    delta=Delta(
                        content=delta.text,
                        is_first=delta.is_first,
                        tool_calls=delta.calls,
                        tool_call_deltas=delta.call_deltas,
                        reasoning_content=delta.reasoning or None,
                    ),
                    finish_reason=delta.finish_reason,
                    logprobs=delta.logprobs,
                    content_logprobs=delta.content_logprobs,
                )
                for delta in deltas
            ),
            usage=usage,
        )


class CompletionShape:
    """Makes completion responses: plain text."""

    def response(self, header: Header, parts: ResponseParts) -> CompletionResponse:
        return CompletionResponse(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=tuple(
                CompletionChoice(
                    finish_reason=choice.finish_reason,
                    index=index,
                    text=choice.text,
                    logprobs=choice.logprobs,
                    stop_string=choice.stop_string,
                    prompt_logprobs=parts.prompt_logprobs(index),
                )
                for index, choice in enumerate(parts.choices())
            ),
            usage=parts.usage_so_far(),
            prompt_logprobs=parts.prompt_logprobs(0) if parts.num_prompts == 1 else None,
        )

    def chunk(self, header: Header, deltas: Sequence[ChoiceDelta], usage: Usage | None) -> CompletionChunkResponse:
        return CompletionChunkResponse(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=tuple(
                CompletionChunkChoice(
                    index=delta.index,
                    text=delta.text,
                    finish_reason=delta.finish_reason,
                    logprobs=delta.logprobs,
                )
                for delta in deltas
            ),
            usage=usage,
        )

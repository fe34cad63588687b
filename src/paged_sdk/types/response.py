"""Hold responses, in OpenAI's shape; each can be written as the JSON of OpenAI's API."""

from __future__ import annotations

import json
from typing import Any, Literal, TypeAlias

from attrs import Factory, asdict, field, frozen

from paged_sdk.types.logprobs import Logprobs
from paged_sdk.types.wire import Wire, finish_fields

__all__ = [
    "CalledFunction",
    "ChatCompletionChunkResponse",
    "ChatCompletionResponse",
    "Choice",
    "ChunkChoice",
    "CompletionChoice",
    "CompletionChunkChoice",
    "CompletionChunkResponse",
    "CompletionResponse",
    "CompletionTokensDetails",
    "Delta",
    "FinishReason",
    "PromptTokensDetails",
    "ResponseMessage",
    "ToolCallDelta",
    "ToolCallResponse",
    "Usage",
]

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "canceled"]


@frozen(kw_only=True)
class PromptTokensDetails(Wire):
    """Says how many prompt tokens were cached.

    :ivar cached_tokens: prompt tokens whose KV came from the prefix cache
    """

    cached_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form."""
        return asdict(self)


@frozen(kw_only=True)
class CompletionTokensDetails(Wire):
    """Counts tokens that a prediction or a constraint determined.

    :ivar accepted_prediction_tokens: tokens of the answer that the prediction had at their place
    :ivar rejected_prediction_tokens: tokens of the prediction that are not in the answer
    :ivar forced_tokens: tokens of the answer that were the only ones its constraint allowed, which take almost no time
    """

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    forced_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form, in which ``forced_tokens`` is an extension."""
        return asdict(self)


@frozen(kw_only=True)
class Usage(Wire):
    """Holds the token counts and timings of a request. Rates are tokens per second, times are seconds.

    :ivar total_prompt_time_sec: from the first scheduled step to the first token
    :ivar total_completion_time_sec: from the first token to the last
    :ivar time_to_first_token_sec: from submission to the first token, queueing included
    :ivar queue_time_sec: from submission to the first scheduled step
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    avg_tok_per_sec: float = 0.0
    avg_prompt_tok_per_sec: float = 0.0
    avg_compl_tok_per_sec: float = 0.0
    total_time_sec: float = 0.0
    total_prompt_time_sec: float = 0.0
    total_completion_time_sec: float = 0.0
    prompt_tokens_details: PromptTokensDetails = field(factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails = field(factory=CompletionTokensDetails)
    time_to_first_token_sec: float = 0.0
    queue_time_sec: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form, in which rates and times are extensions."""
        return asdict(self)


@frozen(kw_only=True)
class CalledFunction(Wire):
    """Holds the function and arguments of a tool call.

    :ivar name: a tool of the request
    :ivar arguments: JSON text of an object
    """

    name: str
    arguments: str

    def parse_arguments(self) -> dict[str, Any]:
        """Return the arguments by name. The text is always an object; whether it fits the tool's schema was only
        checked for required and strict calls.
        """
        arguments: dict[str, Any] = json.loads(self.arguments)
        return arguments

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form."""
        return asdict(self)


@frozen(kw_only=True)
class ToolCallResponse(Wire):
    """Holds a tool call that the model has made.

    :ivar index: its place among the calls of the answer
    :ivar id: nine letters and digits, which some chat templates require; the tool's answer refers to it
    """

    index: int
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form, which has no ``index``."""
        return {"id": self.id, "type": self.type, "function": self.function.to_dict()}


@frozen(kw_only=True)
class ToolCallDelta(Wire):
    """Holds a piece of a tool call that the model is writing.

    :ivar index: its place among the calls of the answer; the same for all pieces of a call
    :ivar id: the call's id; only in its first piece
    :ivar name: the tool's name; only in its first piece
    :ivar arguments: the next part of the arguments, which together are JSON text of an object
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@frozen(kw_only=True)
class ResponseMessage(Wire):
    """Holds the model's turn. It can be added to the next request as it is.

    :ivar content: the text without reasoning and calls
    :ivar tool_calls: calls of the request's tools
    :ivar reasoning_content: the model's reasoning before its answer; None: none
    """

    content: str
    role: str = "assistant"
    tool_calls: tuple[ToolCallResponse, ...] = ()
    reasoning_content: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form, in which ``reasoning_content`` is an extension, present only if the model reasoned."""
        message: dict[str, Any] = {"role": self.role, "content": self.content, "refusal": None}
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message


@frozen(kw_only=True)
class Choice(Wire):
    """Holds one answer of a chat response.

    :ivar logprobs: those of all generated tokens, if requested, including tokens of reasoning, of calls and of the
        markers around them, and the one that ended the text
    :ivar stop_string: the stop string that ended the text, which does not contain it; None: something else ended it.
        Not part of the wire form
    :ivar content_logprobs: of ``logprobs``, those of the tokens that contributed characters to ``message.content``.
        None: there are none. Not part of the wire form
    :ivar pieces: the parts of the message in the order in which the model wrote them, as few as that allows, including
        calls that were not completed. Not part of the wire form
    """

    finish_reason: FinishReason
    index: int
    message: ResponseMessage
    logprobs: Logprobs | None = None
    stop_string: str | None = None
    content_logprobs: Logprobs | None = None
    pieces: tuple[ChunkChoice, ...] = field(
        default=Factory(lambda choice: _pieces(choice), takes_self=True), repr=False
    )

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form, in which "canceled" is "length" with the extension ``canceled``."""
        return {
            "index": self.index,
            "message": self.message.to_dict(),
            "logprobs": _logprobs(self.logprobs),
            **finish_fields(self.finish_reason),
        }


@frozen(kw_only=True)
class ChatCompletionResponse(Wire):
    """Holds a whole chat response.

    :ivar created: Unix time in seconds
    :ivar prompt_logprobs: logprobs of every prompt token but the first, if requested
    """

    id: str
    choices: tuple[Choice, ...]
    created: int
    model: str
    usage: Usage
    system_fingerprint: str = "paged_sdk"
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: Logprobs | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form, in which ``prompt_logprobs`` is an extension, present only if requested."""
        return _response_fields(self)


@frozen(kw_only=True)
class Delta(Wire):
    """Holds what a chunk adds to an answer: reasoning, then content, then calls.

    :ivar tool_calls: completed tool calls
    :ivar tool_call_deltas: pieces of calls, complete or not; text that begins as a call but turns out not to be one is
        content in the end
    :ivar reasoning_content: the next part of the reasoning
    :ivar is_first: whether the choice's text begins here; not part of the wire form
    """

    content: str
    role: str = "assistant"
    is_first: bool = False
    tool_calls: tuple[ToolCallResponse, ...] = ()
    reasoning_content: str | None = None
    tool_call_deltas: tuple[ToolCallDelta, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form, with the role in a choice's first piece only, since clients join pieces, and with
        pieces of calls in ``tool_calls``.
        """
        delta: dict[str, Any] = {"content": self.content} if self.content else {}
        if self.is_first:
            delta = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            delta["reasoning_content"] = self.reasoning_content
        if self.tool_call_deltas:
            delta["tool_calls"] = [call.to_dict() for call in self.tool_call_deltas]
        return delta


@frozen(kw_only=True)
class ChunkChoice(Wire):
    """Holds what a chunk adds to one choice; ``finish_reason`` is set in the choice's last chunk.

    :ivar logprobs: of the tokens generated since the last chunk. The text of some may be held back, as possible parts
        of a stop string or a call: it comes in a later chunk, or never
    :ivar content_logprobs: of the tokens that make up ``delta.content``, whenever they were generated. A token shared
        by the content of several chunks is in the first of them. None: there are none. Not part of the wire form
    """

    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None
    content_logprobs: Logprobs | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form, in which "canceled" is "length" with the extension ``canceled``."""
        return {
            "index": self.index,
            "delta": self.delta.to_dict(),
            "logprobs": _logprobs(self.logprobs),
            **finish_fields(self.finish_reason),
        }


@frozen(kw_only=True)
class ChatCompletionChunkResponse(Wire):
    """Holds a chunk of a streamed chat response; the last one has ``usage``."""

    id: str
    choices: tuple[ChunkChoice, ...]
    created: int
    model: str
    system_fingerprint: str = "paged_sdk"
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form."""
        return _response_fields(self)


@frozen(kw_only=True)
class CompletionChoice(Wire):
    """Holds one text of a completion.

    :ivar stop_string: the stop string that ended the text, which does not contain it; None: something else ended it.
        Not part of the wire form
    :ivar prompt_logprobs: logprobs of all tokens of its prompt but the first, if requested. Not part of the wire form
    """

    finish_reason: FinishReason
    index: int
    text: str
    logprobs: Logprobs | None = None
    stop_string: str | None = None
    prompt_logprobs: Logprobs | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form, in which "canceled" is "length" with the extension ``canceled``."""
        return _text_fields(self)


@frozen(kw_only=True)
class CompletionResponse(Wire):
    """Holds a whole plain-text completion.

    :ivar prompt_logprobs: of a single prompt, logprobs of all tokens but the first, if requested; those of several
        prompts are with the choices
    """

    id: str
    choices: tuple[CompletionChoice, ...]
    created: int
    model: str
    usage: Usage
    system_fingerprint: str = "paged_sdk"
    object: Literal["text_completion"] = "text_completion"
    prompt_logprobs: Logprobs | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form, in which ``prompt_logprobs`` is an extension, present only if requested."""
        return _response_fields(self)


@frozen(kw_only=True)
class CompletionChunkChoice(Wire):
    """Holds what a chunk adds to one choice of a completion."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form, in which "canceled" is "length" with the extension ``canceled``, and offsets of
        logprobs count from the beginning of this piece."""
        return _text_fields(self)


@frozen(kw_only=True)
class CompletionChunkResponse(Wire):
    """Holds a chunk of a streamed completion; the last one has ``usage``."""

    id: str
    choices: tuple[CompletionChunkChoice, ...]
    created: int
    model: str
    system_fingerprint: str = "paged_sdk"
    object: Literal["text_completion.chunk"] = "text_completion.chunk"
    usage: Usage | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form, in which ``object`` is that of a whole completion, as in OpenAI's API."""
        return {**_response_fields(self), "object": "text_completion"}


def _pieces(choice: Choice) -> tuple[ChunkChoice, ...]:
    """Return a message as one piece: reasoning, then content, then calls."""
    message = choice.message
    delta = Delta(
        content=message.content,
        role=message.role,
        is_first=True,
        tool_calls=message.tool_calls,
        reasoning_content=message.reasoning_content,
        tool_call_deltas=tuple(
            ToolCallDelta(index=call.index, arguments=call.function.arguments, id=call.id, name=call.function.name)
            for call in message.tool_calls
        ),
    )
    return (ChunkChoice(index=choice.index, delta=delta, content_logprobs=choice.content_logprobs),)


def _response_fields(
    response: ChatCompletionResponse | ChatCompletionChunkResponse | CompletionResponse | CompletionChunkResponse,
) -> dict[str, Any]:
    fields = {
        "id": response.id,
        "object": response.object,
        "created": response.created,
        "model": response.model,
        "choices": [choice.to_dict() for choice in response.choices],
        "usage": None if response.usage is None else response.usage.to_dict(),
        "system_fingerprint": response.system_fingerprint,
    }
    if isinstance(response, ChatCompletionResponse | CompletionResponse) and response.prompt_logprobs is not None:
        fields["prompt_logprobs"] = response.prompt_logprobs.to_dict()
    return fields


def _text_fields(choice: CompletionChoice | CompletionChunkChoice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": None if choice.logprobs is None else choice.logprobs.to_completion_dict(choice.text),
        **finish_fields(choice.finish_reason),
    }


def _logprobs(logprobs: Logprobs | None) -> dict[str, Any] | None:
    return None if logprobs is None else logprobs.to_dict()

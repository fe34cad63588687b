"""Describe what Anthropic's messages API answers here: its code is held to it, and the OpenAPI document made of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypedDict

__all__ = [
    "AnthropicError",
    "Block",
    "MessageEvent",
    "MessageUsage",
    "Stop",
    "StopReason",
    "ToolUseAnswer",
    "WholeMessage",
]

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class AnthropicErrorDetails(TypedDict):
    """Says what was wrong."""

    type: str
    message: str


class AnthropicError(TypedDict):
    """Says why there is no answer, or no more of it."""

    type: Literal["error"]
    error: AnthropicErrorDetails


class Caller(TypedDict):
    """Says that the model has called a tool itself."""

    type: Literal["direct"]


class TextAnswer(TypedDict):
    """Is a text of the model's."""

    type: Literal["text"]
    text: str
    citations: None


class ThinkingAnswer(TypedDict):
    """Is what the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str, "Empty: nothing is signed."]


class ToolUseAnswer(TypedDict):
    """Is a call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Caller


Block: TypeAlias = TextAnswer | ThinkingAnswer | ToolUseAnswer


class MessageUsage(TypedDict):
    """Says what a message has cost."""

    input_tokens: Annotated[int, "Tokens of the prompt that were computed."]
    cache_creation_input_tokens: int
    cache_read_input_tokens: Annotated[int, "Tokens of the prompt that came from the cache."]
    cache_creation: None
    output_tokens: int
    output_tokens_details: None
    server_tool_use: None
    service_tier: Literal["standard"]
    inference_geo: None


class Stop(TypedDict):
    """Says why a message has ended; in the beginning of a stream, all of it is null."""

    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None


class WholeMessage(Stop):
    """Is the answer to a conversation."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    container: None
    content: list[Block]
    usage: MessageUsage


class MessageStart(TypedDict):
    """Begins a message."""

    type: Literal["message_start"]
    message: WholeMessage


class Ping(TypedDict):
    """Says that the server is still there."""

    type: Literal["ping"]


class BlockStart(TypedDict):
    """Begins a block."""

    type: Literal["content_block_start"]
    index: int
    content_block: Block


class TextDelta(TypedDict):
    """Adds to a text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    """Adds to what the model thought."""

    type: Literal["thinking_delta"]
    thinking: str


class InputDelta(TypedDict):
    """Adds to the input of a tool, which is JSON of an object in the end."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(TypedDict):
    """Adds to a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(TypedDict):
    """Ends a block."""

    type: Literal["content_block_stop"]
    index: int


class MessageDelta(TypedDict):
    """Says why a message has ended, and what it has cost."""

    type: Literal["message_delta"]
    delta: Stop
    usage: MessageUsage


class MessageStop(TypedDict):
    """Ends a message."""

    type: Literal["message_stop"]


MessageEvent: TypeAlias = (
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | AnthropicError
)
"""Is what a stream is made of."""

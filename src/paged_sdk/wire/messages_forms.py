"""Describes the answers of the messages API (Anthropic's). The OpenAPI document is made from these types, and the tests
check every answer against them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypedDict

from paged_sdk.wire.body import Bounds

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
    """Describes the error."""

    type: str
    message: str


class AnthropicError(TypedDict):
    """Reports an error, instead of an answer or within a stream."""

    type: Literal["error"]
    error: AnthropicErrorDetails


class Caller(TypedDict):
    """States that the model made the call itself."""

    type: Literal["direct"]


class TextAnswer(TypedDict):
    """Holds text of the model."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Bounds(0, 0), "There are none. The AI SDK refuses null."]


class ThinkingAnswer(TypedDict):
    """Holds reasoning of the model."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str, "Empty: nothing is signed."]


class ToolUseAnswer(TypedDict):
    """Holds a tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Caller


Block: TypeAlias = TextAnswer | ThinkingAnswer | ToolUseAnswer


class MessageUsage(TypedDict):
    """Counts a message's tokens."""

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
    """Tells why a message ended; at the start of a stream, all fields are null."""

    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None


class WholeMessage(Stop):
    """Holds a whole answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    container: None
    content: list[Block]
    usage: MessageUsage


class MessageStart(TypedDict):
    """Starts a message."""

    type: Literal["message_start"]
    message: WholeMessage


class Ping(TypedDict):
    """Follows ``message_start``; clients ignore it."""

    type: Literal["ping"]


class BlockStart(TypedDict):
    """Starts a content block."""

    type: Literal["content_block_start"]
    index: int
    content_block: Block


class TextDelta(TypedDict):
    """Adds text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    """Adds reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class InputDelta(TypedDict):
    """Adds to a tool's input; all pieces together are the JSON of an object."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(TypedDict):
    """Adds to a content block."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(TypedDict):
    """Ends a content block."""

    type: Literal["content_block_stop"]
    index: int


class MessageDelta(TypedDict):
    """Tells why a message ended, and its usage."""

    type: Literal["message_delta"]
    delta: Stop
    usage: MessageUsage


class MessageStop(TypedDict):
    """Ends a message."""

    type: Literal["message_stop"]


MessageEvent: TypeAlias = (
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | AnthropicError
)
"""An event of a stream."""

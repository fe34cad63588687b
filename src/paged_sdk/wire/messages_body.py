"""Describes the bodies of Anthropic's messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required, TypedDict

from paged_sdk.wire.body import Bounds
from paged_sdk.wire.cache_control import CacheControl

__all__ = [
    "AnyOrNoTool",
    "ConversationBody",
    "CountTokensBody",
    "MessagesBody",
    "NamedToolChoice",
    "ToolDefinition",
    "Turn",
]


class TextBlock(TypedDict, total=False):
    """Holds text."""

    type: Required[Literal["text"]]
    text: Required[str]
    cache_control: CacheControl | None
    citations: Annotated[list[Any] | None, Bounds(0, 0), "there are none"]


class Base64Source(TypedDict):
    """Holds an image."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(TypedDict):
    """Holds an image's address, or a data URL."""

    type: Literal["url"]
    url: str


class NoTransformations(TypedDict, total=False):
    """Holds no transformations of an image: none is supported."""


class ImageBlock(TypedDict, total=False):
    """Holds an image with its source."""

    type: Required[Literal["image"]]
    source: Required[Base64Source | UrlSource]
    cache_control: CacheControl | None
    transformations: NoTransformations | None


class ToolResultBlock(TypedDict, total=False):
    """Holds a tool's result."""

    type: Required[Literal["tool_result"]]
    tool_use_id: Required[Annotated[str, Bounds(1)]]
    content: Annotated[str | list[TextBlock] | None, "Texts: put images next to the result."]
    is_error: Annotated[bool | None, "Whether it failed: the model is told so before the text."]
    cache_control: CacheControl | None
    toolset_name: Annotated[None, "there are no sets of tools"]


class DirectCaller(TypedDict):
    """States that the model made the call itself."""

    type: Literal["direct"]


class ToolUseBlock(TypedDict, total=False):
    """Holds a tool call of the model."""

    type: Required[Literal["tool_use"]]
    id: Required[Annotated[str, Bounds(1)]]
    name: Required[Annotated[str, Bounds(1)]]
    input: Required[dict[str, Any]]
    cache_control: CacheControl | None
    caller: DirectCaller | None
    toolset_name: Annotated[None, "there are no sets of tools"]


class ThinkingBlock(TypedDict, total=False):
    """Holds reasoning of the model."""

    type: Required[Literal["thinking"]]
    thinking: Required[str]
    signature: Annotated[str | None, "Any value: signatures are not checked."]


class Turn(TypedDict):
    """Holds a turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ImageBlock | ToolResultBlock | ThinkingBlock | ToolUseBlock]


class ToolDefinition(TypedDict, total=False):
    """Describes a function that the model may call."""

    name: Required[str]
    input_schema: Required[dict[str, Any]]
    description: str | None
    type: Annotated[Literal["custom"] | None, "clients run all tools"]
    strict: Annotated[bool | None, "Whether to enforce the schema of every call."]
    cache_control: CacheControl | None
    eager_input_streaming: Annotated[Literal[True] | None, "inputs are streamed as they are written"]
    defer_loading: Annotated[Literal[False] | None, "the model is told of every tool"]
    allowed_callers: Annotated[list[Literal["direct"]] | None, "The model alone calls tools."]
    input_examples: Annotated[list[Any] | None, Bounds(0, 0), "say them in the description"]


class AnyOrNoTool(TypedDict, total=False):
    """Sets whether the model calls tools."""

    type: Required[Literal["auto", "any", "none"]]
    disable_parallel_tool_use: Annotated[bool | None, "True: at most one call."]


class NamedToolChoice(TypedDict, total=False):
    """Forces a call of one tool."""

    type: Required[Literal["tool"]]
    name: Required[str]
    disable_parallel_tool_use: Annotated[bool | None, "There is one call, either way."]


class ThinkingEnabled(TypedDict, total=False):
    """Enables reasoning."""

    type: Required[Literal["enabled"]]
    budget_tokens: Required[Annotated[int, Bounds(1), "Tokens after which reasoning ends."]]
    display: Annotated[Literal["summarized"] | None, "thoughts are shown, in full"]


class ThinkingAdaptive(TypedDict, total=False):
    """Enables reasoning without a budget."""

    type: Required[Literal["adaptive"]]
    display: Annotated[Literal["summarized"] | None, "thoughts are shown, in full"]


class ThinkingDisabled(TypedDict):
    """Disables reasoning."""

    type: Literal["disabled"]


class JsonOutput(TypedDict):
    """Asks for JSON that matches a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(TypedDict, total=False):
    """Sets effort and format of the answer."""

    effort: Annotated[str | None, "Passed to the chat template as reasoning_effort."]
    format: JsonOutput | None


class Metadata(TypedDict, total=False):
    """Names the end user."""

    user_id: Annotated[str | None, "A label for the server's log."]


class KeptThinking(TypedDict):
    """Keeps the reasoning of all turns."""

    type: Literal["clear_thinking_20251015"]
    keep: Annotated[Literal["all"], "nothing is taken out of the conversation"]


class ContextManagement(TypedDict, total=False):
    """Sets what is taken out of the conversation: nothing."""

    edits: list[KeptThinking] | None


class ConversationBody(TypedDict, total=False):
    """Describes the fields that make up the prompt."""

    model: Required[Annotated[str, "The name of a model or a loaded adapter."]]
    messages: Required[
        Annotated[list[Turn], Bounds(1), "The conversation so far; a final assistant turn is continued."]
    ]
    system: Annotated[str | list[TextBlock] | None, "Instructions."]
    tools: Annotated[list[ToolDefinition] | None, "Functions that the model may call."]
    tool_choice: Annotated[AnyOrNoTool | NamedToolChoice | None, "Whether the model calls a tool, and which one."]
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None
    output_config: OutputConfig | None
    cache_control: CacheControl | None
    speed: Annotated[Literal["standard"] | None, "there is one speed"]
    user_profile_id: Annotated[None, "say it as metadata.user_id"]
    workspace_id: Annotated[None, "there are no workspaces"]
    thread: Annotated[None, "no conversations are kept: send all of its messages"]
    context_management: ContextManagement | None


class CountTokensBody(ConversationBody, total=False):
    """Describes the body of ``/v1/messages/count_tokens``."""


class MessagesBody(ConversationBody, total=False):
    """Describes the body of ``/v1/messages``."""

    max_tokens: Required[Annotated[int, Bounds(1), "Maximum number of tokens to generate."]]
    stream: Annotated[bool | None, "Whether to stream the answer."]
    stop_sequences: Annotated[
        list[Annotated[str, Bounds(1)]] | None, "Strings that end the answer, and are not part of it."
    ]
    temperature: Annotated[float | None, Bounds(0), "Divides the logits; 0 takes the likeliest token."]
    top_p: Annotated[float | None, Bounds(0, 1), "Keep the likeliest tokens that together reach p."]
    top_k: Annotated[int | None, Bounds(0), "Keep the k likeliest tokens; 0 keeps all."]
    metadata: Metadata | None
    service_tier: Annotated[Literal["auto", "standard_only"] | None, "there is one tier"]
    container: Annotated[None, "there are no containers"]
    diagnostics: Annotated[None, "there are none"]
    inference_geo: Annotated[None, "the server is where it is"]

"""Describes the answers of OpenAI's responses API. The OpenAPI document is made from these types, and the tests check
every answer against them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypedDict

from paged_sdk.wire.chat_completions import JsonObjectFormat, TextFormat
from paged_sdk.wire.forms import TokenForm
from paged_sdk.wire.responses_body import (
    FunctionTool,
    JsonSchemaText,
    NamedFunction,
    ReasoningText,
    Status,
    Summary,
    SummaryText,
)

__all__ = ["CallItem", "Item", "MessageItem", "ResponseEvent", "ThoughtItem", "WholeResponse"]


class TextOutput(TypedDict):
    """Holds text of the model."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenForm]


class MessageItem(TypedDict):
    """Holds a message of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[TextOutput]


class ThoughtItem(TypedDict):
    """Holds reasoning of the model."""

    id: str
    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], "All of the reasoning, if a summary was asked for."]
    content: Annotated[list[ReasoningText], "All of the reasoning, otherwise."]
    status: Status


class CallItem(TypedDict):
    """Holds a function call."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, "JSON of an object."]
    status: Status


Item: TypeAlias = MessageItem | ThoughtItem | CallItem


class InputDetails(TypedDict):
    """Breaks down the input tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """Breaks down the output tokens."""

    reasoning_tokens: Annotated[int, "Estimated from the reasoning's share of the characters."]


class ResponseUsage(TypedDict):
    """Counts a response's tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(TypedDict):
    """Tells why a response failed."""

    code: str
    message: str


class Incomplete(TypedDict):
    """Tells why a response was cut off."""

    reason: Literal["max_output_tokens"]


class RepeatedReasoning(TypedDict):
    """Repeats the request's settings of reasoning."""

    effort: str | None
    summary: Summary | None


class RepeatedText(TypedDict):
    """Repeats the request's format of the text."""

    format: TextFormat | JsonObjectFormat | JsonSchemaText
    verbosity: Literal["medium"]


class RepeatedFields(TypedDict):
    """Holds the fields of the request that a response repeats, with defaults for those that were not given."""

    background: Literal[False]
    instructions: str | None
    frequency_penalty: float
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: RepeatedReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float | None
    text: RepeatedText
    tool_choice: Literal["auto", "none", "required"] | NamedFunction
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    user: str | None


class WholeResponse(RepeatedFields):
    """Holds an answer: whole, or the part so far."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: Incomplete | None
    output: list[Item]
    usage: ResponseUsage | None


class Numbered(TypedDict):
    """Describes an event."""

    sequence_number: int


class OfResponse(Numbered):
    """Shows the current state of the response."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: WholeResponse


class OfItem(Numbered):
    """Starts or ends an item."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item


class WithinItem(Numbered):
    """Describes an event of an item."""

    item_id: str
    output_index: int


class OfPart(WithinItem):
    """Starts or ends a part of an item."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: TextOutput | ReasoningText


class TextAdded(WithinItem):
    """Adds text."""

    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[TokenForm]


class TextDone(WithinItem):
    """Ends a text."""

    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[TokenForm]


class ThoughtAdded(WithinItem):
    """Adds reasoning."""

    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ThoughtDone(WithinItem):
    """Ends reasoning."""

    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class WithinSummary(WithinItem):
    """Describes an event of a summary of reasoning."""

    summary_index: int


class OfSummary(WithinSummary):
    """Starts or ends a summary."""

    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    part: SummaryText


class SummaryAdded(WithinSummary):
    """Adds to a summary."""

    type: Literal["response.reasoning_summary_text.delta"]
    delta: str


class SummaryDone(WithinSummary):
    """Ends the text of a summary."""

    type: Literal["response.reasoning_summary_text.done"]
    text: str


class ArgumentsAdded(WithinItem):
    """Adds to a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(WithinItem):
    """Ends a call's arguments."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


ResponseEvent: TypeAlias = (
    OfResponse
    | OfItem
    | OfPart
    | TextAdded
    | TextDone
    | ThoughtAdded
    | ThoughtDone
    | OfSummary
    | SummaryAdded
    | SummaryDone
    | ArgumentsAdded
    | ArgumentsDone
)
"""An event of a stream."""

"""Describes the body of OpenAI's responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required, TypeAlias, TypedDict

from paged_sdk.wire.body import Bounds
from paged_sdk.wire.chat_completions import CacheOptions, ImageDetail, JsonObjectFormat, TextFormat
from paged_sdk.wire.sampling import MAX_TOP_LOGPROBS

__all__ = [
    "FunctionTool",
    "InputBody",
    "InputTokensBody",
    "JsonSchemaText",
    "NamedFunction",
    "ReasoningText",
    "ResponsesBody",
    "Status",
    "Summary",
    "SummaryText",
    "TextConfig",
]

Included: TypeAlias = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
Summary: TypeAlias = Literal["auto", "concise", "detailed"]
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class InputText(TypedDict):
    """Holds text of the user."""

    type: Literal["input_text"]
    text: str


class InputImage(TypedDict, total=False):
    """Holds an image."""

    type: Required[Literal["input_image"]]
    image_url: Required[Annotated[str, "A data: URL, or an address where the server fetches images."]]
    detail: Annotated[ImageDetail | None, "Has no effect: images are seen as the model does."]
    file_id: Annotated[None, "no files are kept"]


class OutputText(TypedDict, total=False):
    """Holds text of the model, in the form of an earlier answer."""

    type: Required[Literal["output_text"]]
    text: Required[str]
    annotations: Annotated[list[Any] | None, Bounds(0, 0), "there are none"]
    logprobs: Annotated[list[dict[str, Any]] | None, "Of any value: the text is what counts."]
    parsed: Annotated[Any, "What OpenAI's client has read of the text, which is what counts."]


class InputMessage(TypedDict, total=False):
    """Holds a message of any role."""

    type: Literal["message"]
    role: Required[Literal["user", "assistant", "system", "developer"]]
    content: Required[str | list[InputText | InputImage | OutputText]]
    id: str | None
    status: Status | None
    phase: Annotated[
        Literal["commentary", "final_answer"] | None, "A label of the model's messages: the text is what counts."
    ]


class FunctionCall(TypedDict, total=False):
    """Holds a function call of the model."""

    type: Required[Literal["function_call"]]
    call_id: Required[Annotated[str, Bounds(1)]]
    name: Required[Annotated[str, Bounds(1)]]
    arguments: Required[Annotated[str, "JSON of an object."]]
    id: str | None
    status: Status | None
    caller: Annotated[None, "the model alone calls functions"]
    namespace: Annotated[None, "there are none"]
    parsed_arguments: Annotated[Any, "What OpenAI's client has read of the arguments, which are what counts."]
    async_: Annotated[None, "clients run all tools"]  # this is how that client serializes its field


class FunctionCallOutput(TypedDict, total=False):
    """Holds a function's result."""

    type: Required[Literal["function_call_output"]]
    call_id: Required[Annotated[str, Bounds(1)]]
    output: Required[Annotated[str | list[InputText], "Texts: images go into a message."]]
    id: str | None
    status: Status | None
    caller: Annotated[None, "the model alone calls functions"]


class ReasoningText(TypedDict):
    """Holds reasoning of the model."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(TypedDict):
    """Holds a summary of the model's reasoning."""

    type: Literal["summary_text"]
    text: str


class ReasoningItem(TypedDict, total=False):
    """Holds the reasoning before an answer."""

    type: Required[Literal["reasoning"]]
    id: str | None
    summary: Annotated[list[SummaryText] | None, "Taken where there is no content."]
    content: list[ReasoningText] | None
    encrypted_content: Annotated[None, "thoughts are not encrypted"]
    status: Status | None


class FunctionTool(TypedDict, total=False):
    """Describes a function that the model may call."""

    type: Required[Literal["function"]]
    name: Required[str]
    description: str | None
    parameters: dict[str, Any] | None
    strict: Annotated[bool | None, "Whether to enforce the schema of every call; null: no."]
    defer_loading: Annotated[Literal[False] | None, "the model is told of every tool"]
    allowed_callers: Annotated[list[Literal["direct"]] | None, "The model alone calls tools."]
    output_schema: Annotated[None, "say it in the description"]


class NamedFunction(TypedDict):
    """Forces a call of one function."""

    type: Literal["function"]
    name: str


class JsonSchemaText(TypedDict, total=False):
    """Asks for JSON that matches a schema."""

    type: Required[Literal["json_schema"]]
    name: Required[str]
    schema: Required[dict[str, Any]]
    strict: Annotated[bool | None, "The schema is enforced either way."]
    description: Annotated[str | None, "Has no effect: the model is not told of the schema."]


class TextConfig(TypedDict, total=False):
    """Sets the format of the text."""

    format: TextFormat | JsonObjectFormat | JsonSchemaText | None
    verbosity: Annotated[Literal["medium"] | None, "say it in a message"]


class ReasoningConfig(TypedDict, total=False):
    """Sets how the model reasons."""

    effort: Annotated[str | None, "Passed to the chat template as reasoning_effort; none: no reasoning."]
    summary: Annotated[Summary | None, "Reasoning is returned as a summary, which holds all of it."]
    generate_summary: Annotated[None, "use summary"]
    context: Annotated[Literal["auto"] | None, "the chat template says which thoughts the model sees again"]
    mode: Annotated[Literal["standard"] | None, "there is one mode"]


class ResponseStreamOptions(TypedDict, total=False):
    """Sets what a stream holds beside the answer."""

    include_obfuscation: Annotated[Literal[False] | None, "there is none"]


class InputBody(TypedDict, total=False):
    """Describes the fields that make up the prompt."""

    model: Required[Annotated[str, "The name of a model or a loaded adapter."]]
    input: Required[
        Annotated[
            str | list[InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem],
            Bounds(1),
            "A text of the user's, or the whole conversation so far.",
        ]
    ]
    instructions: Annotated[str | None, "Instructions before the conversation."]
    text: TextConfig | None
    reasoning: ReasoningConfig | None
    tools: Annotated[list[FunctionTool] | None, "Functions that the model may call."]
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | NamedFunction | None, "Whether the model calls a tool, and which one."
    ]
    parallel_tool_calls: Annotated[bool | None, "False: at most one call."]
    truncation: Annotated[Literal["auto", "disabled"] | None, "auto: cut a conversation that is too long at its front."]
    previous_response_id: Annotated[None, "no responses are stored: send the whole conversation as input"]
    conversation: Annotated[None, "no conversations are stored: send the whole conversation as input"]


class InputTokensBody(InputBody, total=False):
    """Describes the body of ``/v1/responses/input_tokens``."""

    personality: Annotated[None, "say it in the instructions"]


class ResponsesBody(InputBody, total=False):
    """Describes the body of ``/v1/responses``."""

    stream: Annotated[bool | None, "Whether to stream the answer."]
    stream_options: ResponseStreamOptions | None
    max_output_tokens: Annotated[int | None, Bounds(1), "Maximum number of tokens to generate, reasoning included."]
    temperature: Annotated[float | None, Bounds(0), "Divides the logits; 0 takes the likeliest token."]
    top_p: Annotated[float | None, Bounds(0, 1), "Keep the likeliest tokens that together reach p."]
    include: Annotated[
        list[Included] | None, "Logprobs. Reasoning is never encrypted: its items hold it, to be sent back as they are."
    ]
    top_logprobs: Annotated[
        int | None, Bounds(0, MAX_TOP_LOGPROBS), "How many of the likeliest tokens to return with each."
    ]
    metadata: Annotated[dict[str, str] | None, "Returned with the response, and not stored."]
    client_metadata: Annotated[dict[str, str] | None, "Labels of the client's own, which have no effect."]
    user: Annotated[str | None, "A label for the end user, for the server's log."]
    safety_identifier: Annotated[str | None, "A label for the end user, for the server's log."]
    prompt_cache_key: Annotated[str | None, "A group of similar prompts; all groups share one cache."]
    prompt_cache_options: CacheOptions | None
    prompt_cache_retention: Annotated[Literal["in_memory"] | None, "prefixes are kept in memory"]
    service_tier: Annotated[Literal["auto", "default"] | None, "there is one tier"]
    store: Annotated[Literal[False] | None, "no responses are stored"]
    background: Annotated[Literal[False] | None, "no responses are stored"]
    background_options: Annotated[None, "no responses are stored"]
    prompt: Annotated[None, "no prompts are stored"]
    max_tool_calls: Annotated[None, "clients run all tools"]
    context_management: Annotated[None, "there is none but truncation"]
    moderation: Annotated[None, "nothing is moderated"]
    access_programs: Annotated[None, "there are none"]
    image: Annotated[None, "answers are texts"]

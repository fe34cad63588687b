"""Describes the answers of OpenAI's APIs (responses are in ``responses_forms``), and of the server's own endpoints.

The OpenAPI document is made from these types, and the tests check every answer against them.
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from paged_sdk import Usage

__all__ = [
    "AdapterUnloaded",
    "ChatCompletion",
    "ChatCompletionChunk",
    "Embeddings",
    "Error",
    "Health",
    "InputTokenCount",
    "ModelForm",
    "ModelList",
    "TextCompletion",
    "TokenCount",
    "TokenForm",
]


class ErrorDetails(TypedDict):
    """Describes the error."""

    message: str
    type: str
    param: Annotated[str | None, "The field concerned."]
    code: str | None


class Error(TypedDict):
    """Reports an error."""

    error: ErrorDetails


class TopTokenForm(TypedDict):
    """Holds one of the likeliest tokens."""

    token: str
    bytes: list[int]
    logprob: float
    token_id: Annotated[int, "Extension."]


class TokenForm(TopTokenForm):
    """Holds a token and the likeliest tokens at its position."""

    top_logprobs: list[TopTokenForm]


class LogprobsForm(TypedDict):
    """Holds the logprobs of a text."""

    content: list[TokenForm]
    refusal: None


class FunctionForm(TypedDict):
    """Holds name and arguments of a call."""

    name: str
    arguments: Annotated[str, "JSON of an object."]


class ToolCallForm(TypedDict):
    """Holds a tool call."""

    id: str
    type: Literal["function"]
    function: FunctionForm


class MessageForm(TypedDict):
    """Holds the model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallForm]]
    reasoning_content: NotRequired[Annotated[str, "Extension: what the model thought."]]


class Ended(TypedDict):
    """Tells why a text ended."""

    finish_reason: Literal["stop", "length", "tool_calls"]
    canceled: NotRequired[Annotated[Literal[True], "Extension: it was cut off by the server."]]


class ChoiceForm(Ended):
    """Holds one choice."""

    index: int
    message: MessageForm
    logprobs: LogprobsForm | None


class ChatCompletion(TypedDict):
    """Holds the answer to a chat request."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChoiceForm]
    usage: Annotated[Usage, "Rates and times are extensions."]
    system_fingerprint: str
    prompt_logprobs: NotRequired[Annotated[LogprobsForm, "Extension."]]


class FunctionDelta(TypedDict):
    """Holds a piece of a call's name and arguments."""

    name: NotRequired[str]
    arguments: str


class ToolCallPiece(TypedDict):
    """Holds a piece of a tool call."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class DeltaForm(TypedDict, total=False):
    """Holds a chunk's addition to a message."""

    role: Literal["assistant"]
    content: str
    reasoning_content: Annotated[str, "Extension: what the model thought."]
    tool_calls: list[ToolCallPiece]


class MayHaveEnded(TypedDict):
    """Tells whether, and why, a text ended."""

    finish_reason: Literal["stop", "length", "tool_calls"] | None
    canceled: NotRequired[Annotated[Literal[True], "Extension: it was cut off by the server."]]


class ChunkChoiceForm(MayHaveEnded):
    """Holds a chunk's addition to one choice."""

    index: int
    delta: DeltaForm
    logprobs: LogprobsForm | None


class ChatCompletionChunk(TypedDict):
    """Holds a chunk of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoiceForm]
    system_fingerprint: str
    usage: NotRequired[Annotated[Usage | None, "In a chunk of its own, if it was asked for."]]


class TextLogprobsForm(TypedDict):
    """Holds the logprobs of a plain text. The first token of an echoed prompt has none: nothing precedes it."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoiceForm(MayHaveEnded):
    """Holds one text, or a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobsForm | None


class TextCompletion(TypedDict):
    """Holds completions of plain text, or a chunk of them."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoiceForm]
    system_fingerprint: str
    usage: NotRequired[Annotated[Usage | None, "In a stream: in a chunk of its own, if requested."]]
    prompt_logprobs: NotRequired[Annotated[LogprobsForm, "Extension."]]


class EmbeddingForm(TypedDict):
    """Holds one embedding."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[list[float] | str, "Numbers, or the base64 of little-endian float32."]


class EmbeddingsUsage(TypedDict):
    """Counts the tokens of embedded or ranked texts."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    """Holds embeddings of texts."""

    object: Literal["list"]
    data: list[EmbeddingForm]
    model: str
    usage: EmbeddingsUsage


class DocumentText(TypedDict):
    """Holds a document that was ranked."""

    text: str


class RankedDocumentForm(TypedDict):
    """Scores a document's relevance to the query."""

    index: Annotated[int, "The document's index in the request."]
    relevance_score: Annotated[float, "From 0 to 1: the logistic function of the model's output."]
    document: NotRequired[DocumentText]


class RankedDocuments(TypedDict):
    """Lists the most relevant documents, the best first."""

    model: str
    results: list[RankedDocumentForm]
    usage: EmbeddingsUsage


class ModelForm(TypedDict):
    """Describes a model, or an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Annotated[Literal["model"], "As in Anthropic's API."]
    display_name: Annotated[str, "As in Anthropic's API."]
    created_at: Annotated[str, "As in Anthropic's API: the time, in RFC 3339."]
    parent: Annotated[str | None, "Extension: the model that an adapter belongs to."]
    max_model_len: Annotated[int, "Extension: tokens of prompt and answer together."]
    input_modalities: Annotated[list[Literal["text", "image"]], "Extension: accepted input."]
    output_modalities: Annotated[
        list[Literal["text", "embedding", "rank"]], "Extension: text, ranks, or embeddings alone."
    ]


class ModelList(TypedDict):
    """Lists models."""

    object: Literal["list"]
    data: list[ModelForm]
    first_id: Annotated[str | None, "As in Anthropic's API."]
    last_id: Annotated[str | None, "As in Anthropic's API."]
    has_more: Annotated[Literal[False], "As in Anthropic's API: all are listed."]


class AdapterUnloaded(TypedDict):
    """Confirms that an adapter was unloaded."""

    id: str
    object: Literal["model"]
    deleted: Literal[True]


class TokenCount(TypedDict):
    """Counts a conversation's tokens."""

    input_tokens: int


class InputTokenCount(TokenCount):
    """Counts the tokens of a response's input."""

    object: Literal["response.input_tokens"]


class Health(TypedDict):
    """Reports the server's health."""

    status: Literal["ok", "ready", "loading", "ending", "failed"]
    models: NotRequired[Annotated[list[str], "Models whose engines have stopped."]]

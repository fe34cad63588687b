"""Describe what OpenAI's API answers here, but for responses, as the code beside it writes it.

The OpenAPI document is made of this, and every answer that the tests get is held to it.
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
    "ModelForm",
    "ModelList",
    "TextCompletion",
    "TokenCount",
    "TokenForm",
]


class ErrorDetails(TypedDict):
    """Says what was wrong."""

    message: str
    type: str
    param: Annotated[str | None, "The field concerned."]
    code: str | None


class Error(TypedDict):
    """Says why there is no answer."""

    error: ErrorDetails


class TopTokenForm(TypedDict):
    """Is one of the likeliest tokens."""

    token: str
    bytes: list[int]
    logprob: float
    token_id: Annotated[int, "Extension."]


class TokenForm(TopTokenForm):
    """Is a token, and the likeliest ones at its place."""

    top_logprobs: list[TopTokenForm]


class LogprobsForm(TypedDict):
    """Holds the logprobs of a text."""

    content: list[TokenForm]
    refusal: None


class FunctionForm(TypedDict):
    """Holds what a call says."""

    name: str
    arguments: Annotated[str, "JSON of an object."]


class ToolCallForm(TypedDict):
    """Is a call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionForm


class MessageForm(TypedDict):
    """Is the model's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallForm]]
    reasoning_content: NotRequired[Annotated[str, "Extension: what the model thought."]]


class Ended(TypedDict):
    """Says why a text has ended."""

    finish_reason: Literal["stop", "length", "tool_calls"]
    canceled: NotRequired[Annotated[Literal[True], "Extension: it was cut off by the server."]]


class ChoiceForm(Ended):
    """Is one answer."""

    index: int
    message: MessageForm
    logprobs: LogprobsForm | None


class ChatCompletion(TypedDict):
    """Is the answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChoiceForm]
    usage: Annotated[Usage, "Rates and times are extensions."]
    system_fingerprint: str
    prompt_logprobs: NotRequired[Annotated[LogprobsForm, "Extension."]]


class FunctionDelta(TypedDict):
    """Is a piece of a call."""

    name: NotRequired[str]
    arguments: str


class ToolCallPiece(TypedDict):
    """Is a piece of a call of a tool."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class DeltaForm(TypedDict, total=False):
    """Is what a chunk adds to a text."""

    role: Literal["assistant"]
    content: str
    reasoning_content: Annotated[str, "Extension: what the model thought."]
    tool_calls: list[ToolCallPiece]


class MayHaveEnded(TypedDict):
    """Says why a text has ended, if it has."""

    finish_reason: Literal["stop", "length", "tool_calls"] | None
    canceled: NotRequired[Annotated[Literal[True], "Extension: it was cut off by the server."]]


class ChunkChoiceForm(MayHaveEnded):
    """Is what a chunk adds to one choice."""

    index: int
    delta: DeltaForm
    logprobs: LogprobsForm | None


class ChatCompletionChunk(TypedDict):
    """Is a piece of the answer to a chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoiceForm]
    system_fingerprint: str
    usage: NotRequired[Annotated[Usage | None, "In a chunk of its own, if it was asked for."]]


class TextLogprobsForm(TypedDict):
    """Holds the logprobs of a plain text."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class TextChoiceForm(MayHaveEnded):
    """Is one text, or a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobsForm | None


class TextCompletion(TypedDict):
    """Is a completion of a plain text, or a piece of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoiceForm]
    system_fingerprint: str
    usage: NotRequired[Annotated[Usage | None, "In a stream: in a chunk of its own, if requested."]]
    prompt_logprobs: NotRequired[Annotated[LogprobsForm, "Extension."]]


class EmbeddingForm(TypedDict):
    """Is one vector."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[list[float] | str, "Numbers, or the base64 of little-endian float32."]


class EmbeddingsUsage(TypedDict):
    """Says what vectors, or ranks, have cost."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    """Holds the vectors of texts."""

    object: Literal["list"]
    data: list[EmbeddingForm]
    model: str
    usage: EmbeddingsUsage


class DocumentText(TypedDict):
    """Holds a document that was ranked."""

    text: str


class RankedDocumentForm(TypedDict):
    """Says how well a document goes with the query."""

    index: Annotated[int, "The document's index in the request."]
    relevance_score: Annotated[float, "From 0 to 1: the logistic function of the model's output."]
    document: NotRequired[DocumentText]


class RankedDocuments(TypedDict):
    """Holds the documents that go best with a query, the best first."""

    model: str
    results: list[RankedDocumentForm]
    usage: EmbeddingsUsage


class ModelForm(TypedDict):
    """Describes a model, or an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
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


class AdapterUnloaded(TypedDict):
    """Says that an adapter is gone."""

    id: str
    object: Literal["model"]
    deleted: Literal[True]


class TokenCount(TypedDict):
    """Says how many tokens a conversation has."""

    input_tokens: int


class Health(TypedDict):
    """Says how the server is."""

    status: Literal["ok", "ready", "loading", "ending", "failed"]
    models: NotRequired[Annotated[list[str], "Models whose engines have stopped."]]

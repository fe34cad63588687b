"""Hold responses, in OpenAI's shape."""

from __future__ import annotations

from typing import Literal, TypeAlias

from attrs import field, frozen

__all__ = [
    "ChatCompletionChunkResponse",
    "ChatCompletionResponse",
    "Choice",
    "ChunkChoice",
    "CompletionChoice",
    "CompletionChunkChoice",
    "CompletionChunkResponse",
    "CompletionResponse",
    "Delta",
    "FinishReason",
    "Logprobs",
    "PromptTokensDetails",
    "ResponseMessage",
    "TokenLogprob",
    "TopLogprob",
    "Usage",
]

FinishReason: TypeAlias = Literal["stop", "length", "canceled"]


@frozen(kw_only=True)
class TopLogprob:
    """Describes one of the likeliest tokens at a position.

    :ivar token: the token's text; bytes that are no UTF-8 show as U+FFFD
    :ivar logprob: natural logarithm of its probability, before temperature and truncation
    :ivar bytes: its bytes
    """

    token: str
    token_id: int
    logprob: float
    bytes: tuple[int, ...]


@frozen(kw_only=True)
class TokenLogprob:
    """Describes the chosen token at a position, and the likeliest ones there."""

    token: str
    token_id: int
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...] = ()


@frozen(kw_only=True)
class Logprobs:
    """Holds the logprobs of one text.

    :ivar content: one entry per token
    """

    content: tuple[TokenLogprob, ...]


@frozen(kw_only=True)
class PromptTokensDetails:
    """Says where the KV of the prompt's tokens came from.

    :ivar cached_tokens: prompt tokens whose KV came from the prefix cache
    """

    cached_tokens: int = 0


@frozen(kw_only=True)
class Usage:
    """Says what a request cost. Rates are tokens per second, times are seconds.

    :ivar total_prompt_time_sec: from the first scheduled step to the first token
    :ivar total_completion_time_sec: from the first token to the last
    :ivar time_to_first_token_sec: from submission to the first token, waiting included
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
    time_to_first_token_sec: float = 0.0
    queue_time_sec: float = 0.0


@frozen(kw_only=True)
class ResponseMessage:
    """Holds the model's turn."""

    content: str
    role: str = "assistant"


@frozen(kw_only=True)
class Choice:
    """Holds one text of a chat response."""

    finish_reason: FinishReason
    index: int
    message: ResponseMessage
    logprobs: Logprobs | None = None


@frozen(kw_only=True)
class ChatCompletionResponse:
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


@frozen(kw_only=True)
class Delta:
    """Holds what a chunk adds to a text."""

    content: str
    role: str = "assistant"


@frozen(kw_only=True)
class ChunkChoice:
    """Holds what a chunk adds to one choice; ``finish_reason`` is set in the choice's last one."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None


@frozen(kw_only=True)
class ChatCompletionChunkResponse:
    """Holds a piece of a streamed chat response; the last one carries ``usage``."""

    id: str
    choices: tuple[ChunkChoice, ...]
    created: int
    model: str
    system_fingerprint: str = "paged_sdk"
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | None = None


@frozen(kw_only=True)
class CompletionChoice:
    """Holds one text of a completion."""

    finish_reason: FinishReason
    index: int
    text: str
    logprobs: Logprobs | None = None


@frozen(kw_only=True)
class CompletionResponse:
    """Holds a whole plain-text completion."""

    id: str
    choices: tuple[CompletionChoice, ...]
    created: int
    model: str
    usage: Usage
    system_fingerprint: str = "paged_sdk"
    object: Literal["text_completion"] = "text_completion"
    prompt_logprobs: Logprobs | None = None


@frozen(kw_only=True)
class CompletionChunkChoice:
    """Holds what a chunk adds to one choice of a completion."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None


@frozen(kw_only=True)
class CompletionChunkResponse:
    """Holds a piece of a streamed completion; the last one carries ``usage``."""

    id: str
    choices: tuple[CompletionChunkChoice, ...]
    created: int
    model: str
    system_fingerprint: str = "paged_sdk"
    object: Literal["text_completion.chunk"] = "text_completion.chunk"
    usage: Usage | None = None

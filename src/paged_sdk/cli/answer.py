"""Builds requests, and shows answers while they are generated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import evolve, frozen

from paged_sdk import (
    BlockingChatStream,
    BlockingCompletionStream,
    ChatCompletionChunkResponse,
    CompletionChunkResponse,
    Constraint,
    RequestBuilder,
    SamplingParams,
    TextMessageRole,
    TextMessages,
    Usage,
    VisionMessages,
)
from paged_sdk.cli.terminal import Terminal, usage_line
from paged_sdk.cli.text_options import SamplingOptions
from paged_sdk.wire.sampling import SamplingFields, read_sampling

__all__ = ["RequestSettings", "empty_conversation", "sampling_of", "show_answer", "with_user_turn"]


def sampling_of(options: SamplingOptions) -> SamplingParams:
    """Return the sampling settings: greedy if none is given; otherwise the missing ones come from the checkpoint.

    :raises ConfigError: value out of range
    """
    said: SamplingFields = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
    }
    sampling = evolve(read_sampling(said, max_len=None, top_n=None), seed=options.seed)
    if sampling == SamplingParams():
        sampling = SamplingParams.deterministic()
    return evolve(sampling, max_len=options.max_tokens)


def empty_conversation(system: str | None) -> TextMessages:
    """Return a conversation without turns.

    :param system: the system message, if any
    """
    return TextMessages() if system is None else TextMessages().add_message(TextMessageRole.SYSTEM, system)


def with_user_turn(messages: TextMessages, text: str, images: Sequence[Path]) -> TextMessages:
    """Return a conversation with one more turn of the user.

    :param images: the turn's images
    :raises InvalidRequestError: an image cannot be read
    """
    if not images:
        return messages.add_message(TextMessageRole.USER, text)
    return VisionMessages(messages.messages).add_image_message(TextMessageRole.USER, text, list(images))


@frozen(kw_only=True)
class RequestSettings:
    """Holds the settings of requests.

    :ivar adapter: name of the adapter to use, if any
    :ivar constraint: constraint on answers, if any
    """

    sampling: SamplingParams
    adapter: str | None = None
    constraint: Constraint | None = None

    def chat_request(self, messages: TextMessages) -> RequestBuilder:
        """Return the request for the next turn of a conversation."""
        request = RequestBuilder.from_messages(messages).with_sampling(self.sampling)
        if self.adapter is not None:
            request = request.with_adapter(self.adapter)
        return request if self.constraint is None else request.with_constraint(self.constraint)


def show_answer(stream: BlockingChatStream | BlockingCompletionStream, terminal: Terminal) -> None:
    """Print a response as it is generated, then its usage. Any exception while printing ends the request.

    :raises KeyboardInterrupt: Ctrl-C; the text so far is in ``stream.response_so_far()``
    :raises PagedError: the request failed
    """
    usage: Usage | None = None
    with stream:
        try:
            for chunk in stream:
                _show(chunk, terminal)
                usage = chunk.usage
        finally:
            terminal.end_line()
    if usage is not None:
        terminal.note(usage_line(usage))


def _show(chunk: ChatCompletionChunkResponse | CompletionChunkResponse, terminal: Terminal) -> None:
    if isinstance(chunk, CompletionChunkResponse):
        terminal.text(chunk.choices[0].text)
    else:
        delta = chunk.choices[0].delta
        terminal.thought(delta.reasoning_content or "")
        terminal.text(delta.content)

"""Defines the events that a step sends to the listeners of its requests."""

from __future__ import annotations

from typing import Protocol

from attrs import field, frozen

from paged_sdk.engine.request_start import RequestStart
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.types.reading import ReadResult
from paged_sdk.types.response import FinishReason, Usage

__all__ = ["Listener", "Outbox", "RequestEvent"]


@frozen(kw_only=True)
class RequestEvent:
    """Tells a listener of an event of its request other than new tokens.

    :ivar index: the choice that ``logprobs`` and ``finish_reason`` belong to
    :ivar logprobs: logprobs of the tokens of this step
    :ivar finish_reason: why the choice has ended; no more tokens follow
    :ivar prompt_logprobs: logprobs of every prompt token but the first, if asked for; sent with the first token
    :ivar start: token counts and times of the request's start; sent with the first token, or once a prefix is pinned
    :ivar reading: the result read from the prompt (embedding, rank or scores), if requested; sent with the last event
    :ivar usage: set in the request's last event, unless that is an error
    :ivar error: the error that the request ends with
    """

    request_id: str
    index: int = 0
    logprobs: tuple[RawLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[RawLogprobs, ...] = ()
    start: RequestStart | None = None
    reading: ReadResult | None = field(default=None, eq=False)
    usage: Usage | None = None
    error: Exception | None = None

    @property
    def is_last(self) -> bool:
        return self.usage is not None or self.error is not None


class Listener(Protocol):
    """Receives a request's output. Its methods are called on the thread that calls :meth:`Outbox.deliver`."""

    def add_tokens(self, index: int, token_ids: list[int]) -> None:
        """Take more tokens of the choice ``index``, without the stop token that ends a text."""
        ...

    def add(self, event: RequestEvent) -> None:
        """Take an event, which comes after the tokens of the same step."""
        ...

    def fail(self, error: Exception) -> None:
        """End the request with an exception that one of the other two methods raised."""
        ...


class Outbox:
    """Collects the output of a step for a group of listeners, to be delivered on their thread.

    Nearly all output is one token per sequence, in three parallel lists: for a step of 256 sequences, one object per
    token took 0.8 ms, and the garbage collections that they triggered as long again.

    :ivar listeners: the listener of each list of tokens
    :ivar indices: the choice that each list of tokens belongs to
    :ivar token_ids: the lists of tokens; they are the runner's own and must not be changed
    :ivar events: events to deliver after the tokens, in order
    """

    __slots__ = ("events", "indices", "listeners", "token_ids")

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.indices: list[int] = []
        self.token_ids: list[list[int]] = []
        self.events: list[tuple[Listener, RequestEvent]] = []

    def __bool__(self) -> bool:
        return bool(self.token_ids or self.events)

    def take(self) -> Outbox:
        """Move the contents into a new outbox, which leaves this one empty."""
        taken = Outbox()
        taken.listeners, self.listeners = self.listeners, []
        taken.indices, self.indices = self.indices, []
        taken.token_ids, self.token_ids = self.token_ids, []
        taken.events, self.events = self.events, []
        return taken

    def deliver(self) -> None:
        """Pass all tokens and events to the listeners; to be called on their thread. An exception of a listener ends
        only its own request."""
        for listener, index, token_ids in zip(self.listeners, self.indices, self.token_ids, strict=True):
            try:
                listener.add_tokens(index, token_ids)
            except Exception as error:
                listener.fail(error)
        for listener, event in self.events:
            try:
                listener.add(event)
            except Exception as error:
                listener.fail(error)

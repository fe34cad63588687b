"""What a step tells the listeners of its requests."""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.types.response import FinishReason, Usage

__all__ = ["Listener", "Outbox", "RequestEvent"]


@frozen(kw_only=True)
class RequestEvent:
    """News of one request other than tokens.

    :ivar index: the choice that ``logprobs`` and ``finish_reason`` belong to
    :ivar logprobs: of the tokens of this step
    :ivar finish_reason: why the choice has ended; the tokens before it are all there are
    :ivar prompt_logprobs: of every prompt token but the first, if asked for; comes with the first token
    :ivar usage: set in the request's last event, unless that is an error
    :ivar error: the request ends with this
    """

    request_id: str
    index: int = 0
    logprobs: tuple[RawLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[RawLogprobs, ...] = ()
    usage: Usage | None = None
    error: Exception | None = None

    @property
    def is_last(self) -> bool:
        return self.usage is not None or self.error is not None


class Listener(Protocol):
    """Who reads a request's output. Its methods are called where :meth:`Outbox.deliver` is, nowhere else."""

    def add_tokens(self, index: int, token_ids: list[int]) -> None:
        """Take more tokens of the choice ``index``, without the one that ends a text."""
        ...

    def add(self, event: RequestEvent) -> None:
        """What else there is to say."""
        ...


class Outbox:
    """What a step has to say to a group of listeners, on its way to their thread.

    Nearly all of it is a token for each text. These lie in three lists side by side: of a step of 256 sequences, an
    object for each took 0.8 ms, and the collections of garbage that so many objects set off took another.

    :ivar listeners: who gets tokens
    :ivar indices: of which choice
    :ivar token_ids: which; the runner's own lists, not to be changed
    :ivar events: what is said after the tokens, in order
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
        """What is in it, which leaves it empty."""
        taken = Outbox()
        taken.listeners, self.listeners = self.listeners, []
        taken.indices, self.indices = self.indices, []
        taken.token_ids, self.token_ids = self.token_ids, []
        taken.events, self.events = self.events, []
        return taken

    def deliver(self) -> None:
        """Tell the listeners, on their thread."""
        for listener, index, token_ids in zip(self.listeners, self.indices, self.token_ids, strict=True):
            listener.add_tokens(index, token_ids)
        for listener, event in self.events:
            listener.add(event)

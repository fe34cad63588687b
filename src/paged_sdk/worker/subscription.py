"""Carry one request's output from the worker thread to one task."""

from __future__ import annotations

from typing import Protocol

from paged_sdk.engine.events import Listener, RequestEvent
from paged_sdk.engine.request_start import RequestStart
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.system.event_loop import EventLoop, OutputLoop, Waiter
from paged_sdk.types.response import FinishReason, Usage

__all__ = ["Subscriber", "Subscription", "UnreadChoice"]


class Subscriber(Listener, Protocol):
    """Receives a request's output on the thread of one event loop."""

    @property
    def loop(self) -> OutputLoop: ...


class UnreadChoice:
    """Holds the unread output of one choice; the reader removes what it takes.

    :ivar finish_reason: set once the choice has ended and no more tokens can come
    """

    __slots__ = ("finish_reason", "logprobs", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[RawLogprobs] = []
        self.finish_reason: FinishReason | None = None


class Subscription:
    """Gathers a request's output until a task reads it, in the event loop where the subscription was created.

    Everything but the constructor runs on the loop's thread: the worker passes a step's output in a callback of the
    loop. So no lock is needed, and steps that a slow reader has missed are merged.

    :ivar choices: the unread output of each choice, in order of index
    :ivar prompt_logprobs: logprobs of every prompt token but the first, by the index of one of the prompt's choices;
        empty until they arrive, or if not requested
    :ivar start: when and how the request started; None until the first token arrives
    :ivar usage: set when the request has ended, unless with an error
    :ivar error: the error that the request has ended with
    """

    def __init__(self, num_choices: int) -> None:
        self.loop: EventLoop = EventLoop()
        self.choices: list[UnreadChoice] = [UnreadChoice() for _ in range(num_choices)]
        self.prompt_logprobs: dict[int, tuple[RawLogprobs, ...]] = {}
        self.start: RequestStart | None = None
        self.usage: Usage | None = None
        self.error: Exception | None = None
        self._has_news = False
        self._until_end = False
        self._waiter: Waiter | None = None

    @property
    def has_ended(self) -> bool:
        """Return whether the request has ended, so that nothing more will arrive."""
        return self.usage is not None or self.error is not None

    def add_tokens(self, index: int, token_ids: list[int]) -> None:
        """Add tokens of one choice."""
        self.choices[index].token_ids += token_ids
        self._has_news = True
        if self._waiter is not None and not self._until_end:
            self._wake()

    def add(self, event: RequestEvent) -> None:
        choice = self.choices[event.index]
        choice.logprobs.extend(event.logprobs)
        choice.finish_reason = event.finish_reason or choice.finish_reason
        if event.prompt_logprobs:
            self.prompt_logprobs[event.index] = event.prompt_logprobs
        self.start = event.start or self.start
        self.usage = event.usage
        self.error = self.error or event.error
        self._has_news = True
        if self._waiter is not None and (self.has_ended or not self._until_end):
            self._wake()

    def fail(self, error: Exception) -> None:
        """End the request with an error that processing its output has raised."""
        self.error = self.error or error
        if self._waiter is not None:
            self._wake()

    async def wait(self, *, until_end: bool) -> None:
        """Wait for output that arrived since the last call, or for the request's end. The reader must take all output
        before it waits again.
        """
        self._until_end = until_end
        while not (self.has_ended or (self._has_news and not until_end)):
            self._waiter = self.loop.waiter()
            await self._waiter.wait()
        self._has_news = False

    def _wake(self) -> None:
        assert self._waiter is not None
        self._waiter.set()
        self._waiter = None

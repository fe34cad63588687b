"""Runs many prompts that generate nothing, with only as many of them in the engine's queue as keep it busy."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import anyio
from attrs import frozen

from paged_sdk.config.engine import EngineConfig
from paged_sdk.engine.events import RequestEvent
from paged_sdk.engine.request_start import RequestStart
from paged_sdk.errors import ModelClosedError, QueueFullError
from paged_sdk.guard import request_failure, request_timeout
from paged_sdk.scheduler.request import Request
from paged_sdk.system.event_loop import EventLoop, Waiter
from paged_sdk.types.reading import ReadResult, TokenScores
from paged_sdk.types.response import Usage
from paged_sdk.worker.engine_access import EngineAccess

if TYPE_CHECKING:  # importing the package loads no numpy
    import numpy as np
    import numpy.typing as npt

__all__ = ["PromptBatch", "ReadPrompt", "most_under_way"]


def most_under_way(config: EngineConfig) -> int:
    """Return how many prompts of one batch keep an engine busy and leave half of its queue to other requests."""
    return max(1, min(2 * config.max_num_seqs, config.max_queue // 2))


@frozen(eq=False)
class ReadPrompt:
    """Holds the result of one prompt."""

    start: RequestStart
    result: ReadResult

    @property
    def vector(self) -> npt.NDArray[np.float32]:
        """Return the result as the vector that was requested."""
        assert not isinstance(self.result, TokenScores)
        return self.result

    @property
    def scores(self) -> TokenScores:
        """Return the result as the scores that were requested."""
        assert isinstance(self.result, TokenScores)
        return self.result


class PromptBatch:
    """Runs prompts in order and waits for all of them.

    Requests are made and queued a few at a time. So a batch of any size leaves room in the queue, and later requests
    wait for few of its prompts. If the queue is full all the same, the remaining prompts wait for those of the batch
    that are in flight, if any. Whatever ends the wait early (an error, a timeout, cancellation) aborts them all.

    :param prepare: makes the requests of the prompts from a first index to an end index (exclusive)
    :param num_prompts: how many prompts there are
    :param most: how many may be in flight at a time
    :param request_id: for errors
    """

    def __init__(
        self,
        worker: EngineAccess,
        prepare: Callable[[int, int], Awaitable[Sequence[Request]]],
        num_prompts: int,
        *,
        most: int,
        request_id: str,
        timeout: float | None,
    ) -> None:
        self._worker = worker
        self._prepare = prepare
        self._num_prompts = num_prompts
        self._most = max(most, 1)
        self._request_id = request_id
        self._timeout = timeout
        self._loop = EventLoop()
        self._waiter: Waiter | None = None
        self._ready: deque[tuple[int, Request]] = deque()
        self._live: dict[int, Request] = {}
        self._read: dict[int, ReadPrompt] = {}
        self._error: Exception | None = None
        self._queue_is_full = False

    async def read(self) -> list[ReadPrompt]:
        """Return the results, in the order of the prompts.

        :raises RequestTimeoutError: the timeout has passed
        :raises QueueFullError: the queue was full when the first prompt was submitted
        :raises RequestError: a prompt failed; the first error
        :raises ModelClosedError: the model was closed meanwhile
        """
        self._worker.check()
        try:
            with self._limit() as scope:
                await self._read_all()
            if scope is not None and scope.cancelled_caught:
                assert self._timeout is not None
                raise request_timeout(self._request_id, self._timeout)
        finally:
            for request in self._live.values():
                self._worker.abort(request.request_id)
        return [self._read[place] for place in range(self._num_prompts)]

    def usage(self, now: float) -> Usage:
        """Return the usage of all prompts together.

        :param now: when the last result arrived, in seconds of the monotonic clock
        """
        return RequestStart.joined([each.start for each in self._read.values()]).usage(0, now)

    def _limit(self) -> AbstractContextManager[anyio.CancelScope | None]:
        return nullcontext() if self._timeout is None else anyio.move_on_after(self._timeout)

    async def _read_all(self) -> None:
        num_made = 0
        while len(self._read) < self._num_prompts:
            if num_made < self._num_prompts and len(self._live) + len(self._ready) <= self._most // 2:
                end = min(num_made + self._most - len(self._live) - len(self._ready), self._num_prompts)
                for place, request in enumerate(await self._prepare(num_made, end), num_made):
                    self._ready.append((place, request))
                num_made = end
            self._submit()
            if self._error is None and self._live:
                self._waiter = self._loop.waiter()
                await self._waiter.wait()
            if self._error is not None:
                raise request_failure(self._error, self._request_id)

    def _submit(self) -> None:
        while self._ready and not self._queue_is_full:
            place, request = self._ready.popleft()
            self._live[place] = request
            try:
                self._worker.submit(request, _Part(self, place))
            except BaseException:
                del self._live[place]
                raise

    @property
    def loop(self) -> EventLoop:
        """Return the event loop that the batch was created in."""
        return self._loop

    def take(self, place: int, event: RequestEvent) -> None:
        """Process an event of a prompt."""
        if not event.is_last or place not in self._live:
            return
        request = self._live.pop(place)
        if event.reading is not None and event.start is not None:
            self._read[place] = ReadPrompt(event.start, event.reading)
            self._queue_is_full = False
        elif isinstance(event.error, QueueFullError) and self._live:
            self._ready.append((place, request))
            self._queue_is_full = True
        else:
            self.fail(event.error or ModelClosedError("the model was closed before the prompts were read"))
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the batch with an error."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.set()
            self._waiter = None


class _Part:
    """Receives the events of one prompt of a batch."""

    __slots__ = ("_batch", "_place", "loop")

    def __init__(self, batch: PromptBatch, place: int) -> None:
        self.loop = batch.loop
        self._batch = batch
        self._place = place

    def add_tokens(self, index: int, token_ids: list[int]) -> None:
        raise AssertionError("nothing is generated after such a prompt")

    def add(self, event: RequestEvent) -> None:
        self._batch.take(self._place, event)

    def fail(self, error: Exception) -> None:
        self._batch.fail(error)

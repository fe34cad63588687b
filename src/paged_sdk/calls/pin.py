"""Pins the KV of chats' prefixes."""

from __future__ import annotations

import time
import uuid
import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType

import anyio
from attrs import frozen

from paged_sdk.calls.loaded_adapters import Adapters
from paged_sdk.calls.pinned_prefix import encode_prefix
from paged_sdk.calls.preparation import RequestPreparer, in_thread
from paged_sdk.chat.renderer import Interruption
from paged_sdk.errors import InvalidRequestError
from paged_sdk.guard import request_failure, request_timeout
from paged_sdk.scheduler.request import Request
from paged_sdk.system.owner import OfOneProcess, closed_model
from paged_sdk.types.request import RequestBuilder
from paged_sdk.types.request_options import RequestOptions
from paged_sdk.worker.engine_access import EngineAccess
from paged_sdk.worker.subscription import Subscription

__all__ = ["Pin", "Pins"]


class Pin(OfOneProcess):
    """Holds the KV of a chat's prefix in the pool until it is released. :meth:`Model.pin` makes it::

        async with await model.pin(messages) as pin:
            ...

    Leaving the context, :meth:`aclose`, dropping the object and closing the model release it.
    """

    def __init__(self, worker: EngineAccess, request: Request, subscription: Subscription, *, block_size: int) -> None:
        num_tokens = len(request.prompt_token_ids)
        self._num_tokens = num_tokens - num_tokens % block_size
        self._subscription = subscription
        self._release = weakref.finalize(self, worker.abort, request.request_id)
        self._release.atexit = False  # the engine ends with the program

    @property
    def num_tokens(self) -> int:
        """Return how many tokens are pinned: those in full blocks, 0 if the prefix is shorter than one."""
        return self._num_tokens

    @property
    def is_released(self) -> bool:
        """Tell whether the KV is no longer held: because of :meth:`aclose`, or because the model was closed or has
        unloaded the adapter that the prefix was computed with.
        """
        return not self._release.alive or self._subscription.has_ended

    async def aclose(self) -> None:
        """Release the KV: it stays in the prefix cache, until its memory is needed. Idempotent."""
        self._release()
        if self._subscription.loop.is_current:  # in another event loop, the next step releases it
            await self._subscription.wait(until_end=True)

    async def __aenter__(self) -> Pin:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _let_go(self) -> None:
        """Release the KV without waiting for that."""
        self._release()


@frozen
class Pins:
    """Pins prefixes.

    :ivar adapters: the adapters that requests may use
    """

    worker: EngineAccess
    preparer: RequestPreparer
    adapters: Adapters

    async def pin(self, chat: RequestBuilder) -> Pin:
        """Implement :meth:`paged_sdk.Model.pin`."""
        preparer, options = self.preparer, chat.options
        preparer.check_generates("messages")
        self._check_can_pin()
        adapter = self.adapters.use(options.adapter)
        request_id, interruption = f"pin-{uuid.uuid4().hex}", Interruption()
        with _limit(options.timeout) as scope:
            arrival = time.monotonic()
            try:
                prefix = await in_thread(partial(encode_prefix, preparer, chat, interruption))
            except BaseException:  # cancelled or timed out: the thread must stop
                interruption.set()
                raise
            own = RequestOptions(priority=options.priority, cache_salt=options.cache_salt, adapter=options.adapter)
            request = preparer.prepare(
                prefix,
                own,
                preparer.sampling(RequestOptions()),
                request_id=request_id,
                arrival=arrival,
                field="messages",
                continues_prompt=True,
                adapter=adapter,
                is_pinned=True,
            )
            return await self._held(request)
        assert scope is not None
        assert options.timeout is not None
        raise request_timeout(request_id, options.timeout)

    async def _held(self, request: Request) -> Pin:
        """Submit a request, and return its pin once the prefix is computed."""
        subscription = Subscription(1)
        self.worker.submit(request, subscription)
        pin = Pin(self.worker, request, subscription, block_size=self.preparer.config.block_size)
        try:
            while subscription.start is None and not subscription.has_ended:
                await subscription.wait(until_end=False)
            if subscription.error is not None:
                raise request_failure(subscription.error, request.request_id)
            if subscription.has_ended:
                raise closed_model()
        except BaseException:
            pin._let_go()
            raise
        return pin

    def _check_can_pin(self) -> None:
        """Check that the engine has something to hold.

        :raises InvalidRequestError: its KV is contiguous, or it has no prefix cache
        """
        config = self.preparer.config
        why_not = None
        if not config.paged:
            why_not = "without paged attention each sequence has KV of its own: build the model with paged attention"
        elif not config.prefix_cache_n:
            why_not = "no request would find it without the prefix cache: build the model with_prefix_cache_n(16)"
        if why_not is not None:
            raise InvalidRequestError(f"the prefix cannot be pinned: {why_not}", field="pin")


def _limit(seconds: float | None) -> AbstractContextManager[anyio.CancelScope | None]:
    return nullcontext() if seconds is None else anyio.move_on_after(seconds)

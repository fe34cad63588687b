"""Define the interface through which models reach an engine that runs on another thread or in another process."""

from __future__ import annotations

from typing import Protocol

from paged_sdk.config.isq import IsqType
from paged_sdk.scheduler.request import Request
from paged_sdk.types.stats import ModelStats
from paged_sdk.worker.subscription import Subscriber

__all__ = ["EngineAccess"]


class EngineAccess(Protocol):
    """Takes requests for an engine: one on a thread of this process, one in another process, or several behind a
    router.

    See :class:`~paged_sdk.worker.worker.Worker`, whose methods mean the same. Operations other than requests are
    methods here, so that they can be called on a remote engine.
    """

    @property
    def stats(self) -> ModelStats: ...

    def check(self) -> None: ...

    def check_process(self) -> None: ...

    @property
    def is_this_thread(self) -> bool: ...

    def submit(self, request: Request, subscription: Subscriber) -> None: ...

    def abort(self, request_id: str) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    async def requantize(self, isq: IsqType) -> None: ...

    def close(self, *, drain: bool = False) -> None: ...

    def join(self, timeout: float | None = None) -> bool: ...

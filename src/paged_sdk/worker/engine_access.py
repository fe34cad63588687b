"""Define what the async face knows of an engine that another thread drives."""

from __future__ import annotations

from typing import Protocol

from paged_sdk.config.isq import IsqType
from paged_sdk.scheduler.request import Request
from paged_sdk.types.stats import ModelStats
from paged_sdk.worker.subscription import Subscriber

__all__ = ["EngineAccess"]


class EngineAccess(Protocol):
    """Takes requests for an engine, or for several that are one for the caller, or for one in another process. See
    :class:`~paged_sdk.worker.worker.Worker`, whose methods mean the same. What is asked of an engine beside requests
    has a name here, so that it can be asked from afar."""

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

"""Define what the async face knows of an engine that another thread drives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from paged_sdk.engine.engine import Engine
from paged_sdk.scheduler.request import Request
from paged_sdk.types.stats import ModelStats
from paged_sdk.worker.subscription import Subscriber

__all__ = ["EngineAccess"]

_T = TypeVar("_T")


class EngineAccess(Protocol):
    """Takes requests for an engine, or for several that are one for the caller. See
    :class:`~paged_sdk.worker.worker.Worker`, whose methods mean the same."""

    @property
    def stats(self) -> ModelStats: ...

    def check(self) -> None: ...

    def check_process(self) -> None: ...

    def submit(self, request: Request, subscription: Subscriber) -> None: ...

    def abort(self, request_id: str) -> None: ...

    async def call(self, function: Callable[[Engine], _T]) -> _T: ...

    async def call_alone(self, function: Callable[[Engine, Callable[[], None]], _T]) -> _T: ...

    def close(self, *, drain: bool = False) -> None: ...

    def join(self, timeout: float | None = None) -> bool: ...

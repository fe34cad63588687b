"""Ends the work for a client that disconnects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import anyio
from starlette.requests import Request
from starlette.types import Receive

__all__ = ["CLIENT_DISCONNECTED", "cancel_when_client_disconnects", "unless_client_disconnects"]

T = TypeVar("T")

CLIENT_DISCONNECTED: Final = 499
"""Status of a request whose client disconnected. It appears only in the log and the metrics."""


async def unless_client_disconnects(request: Request, work: Callable[[], Awaitable[T]]) -> T | None:
    """Run work for a client. If the client disconnects, cancel the work, which also aborts its request in the model,
    and return None.
    """
    result: T | None = None
    error: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_when_client_disconnects, request.receive, tasks.cancel_scope)
        try:
            result = await work()
        except Exception as exception:  # raised below, outside the task group, which would wrap it in an ExceptionGroup
            error = exception
        tasks.cancel_scope.cancel()
    if error is not None:
        raise error
    return result


async def cancel_when_client_disconnects(receive: Receive, scope: anyio.CancelScope) -> None:
    """Wait until the client disconnects, then cancel a scope. What the client sends meanwhile is discarded."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()

"""Knows how many requests are under way, and whether more are taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paged_sdk.wire.problem import Problem

__all__ = ["Drain"]


class Drain:
    """Counts requests under way. Once it has begun, new ones are refused."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._has_begun = False

    @property
    def has_begun(self) -> bool:
        """Tell whether new requests are refused."""
        return self._has_begun

    @property
    def in_flight(self) -> int:
        """Return how many requests are under way."""
        return self._in_flight

    def begin(self) -> None:
        """Refuse requests from now on. Idempotent."""
        self._has_begun = True

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request while it is under way."""
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    @property
    def refusal(self) -> Problem:
        """Return what a client is told that comes too late."""
        return Problem(
            status=503,
            message="the server is ending, and takes no more requests",
            type="server_error",
            code="unavailable",
            headers={"Connection": "close", "Retry-After": "5"},
        )

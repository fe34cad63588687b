"""Knows which requests are under way, and whether more are taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from paged_sdk.wire.problem import Problem

__all__ = ["Drain"]


class Drain:
    """Counts requests under way. Once it has begun, new ones are refused, and those that are not all there; once it is
    over, those that are left end.
    """

    def __init__(self) -> None:
        self._under_way: set[anyio.CancelScope] = set()
        self._coming: set[anyio.CancelScope] = set()
        self._has_begun = False
        self._is_over = False

    @property
    def has_begun(self) -> bool:
        """Tell whether new requests are refused."""
        return self._has_begun

    @property
    def is_over(self) -> bool:
        """Tell whether requests under way are cut off."""
        return self._is_over

    @property
    def in_flight(self) -> int:
        """Return how many requests are under way."""
        return len(self._under_way)

    def begin(self) -> None:
        """Refuse requests from now on. Idempotent."""
        self._has_begun = True

    def refuse_coming(self) -> None:
        """Refuse the requests of which not all has come, which may take as long as their clients like. Called in their
        event loop, from time to time once it has begun.
        """
        for scope in self._coming:
            scope.cancel()

    def cut_off(self) -> int:
        """Cancel the requests that are under way, and return how many these are. Called in their event loop."""
        self.begin()
        self._is_over = True
        for scope in self._under_way:
            scope.cancel()
        return len(self._under_way)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request while it is under way, unless it is cut off before it is done."""
        with anyio.CancelScope() as scope:
            self._under_way.add(scope)
            try:
                yield
            finally:
                self._under_way.discard(scope)

    @contextmanager
    def coming(self) -> Iterator[anyio.CancelScope]:
        """Wait for a request's body, unless it is refused before that is there.

        :returns: what is canceled then
        """
        with anyio.CancelScope() as scope:
            self._coming.add(scope)
            try:
                yield scope
            finally:
                self._coming.discard(scope)

    @property
    def refusal(self) -> Problem:
        """Return what a client is told that comes too late."""
        return _problem("takes no more requests")

    @property
    def interruption(self) -> Problem:
        """Return what a client is told whose request is cut off."""
        return _problem("did not finish this")


def _problem(what: str) -> Problem:
    return Problem(
        status=503,
        message=f"the server is ending, and {what}",
        type="server_error",
        code="unavailable",
        headers={"Connection": "close", "Retry-After": "5"},
    )

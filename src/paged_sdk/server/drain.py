"""Tracks running requests, and drains them on shutdown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from paged_sdk.wire.problem import Problem

__all__ = ["Drain"]


class Drain:
    """Tracks running requests. Once draining has begun, new requests are refused, as are requests whose body is
    incomplete. Once it is over, the remaining requests are canceled.
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
        """Tell whether running requests have been cut off."""
        return self._is_over

    @property
    def in_flight(self) -> int:
        """Return the number of running requests."""
        return len(self._under_way)

    def begin(self) -> None:
        """Refuse new requests from now on. Idempotent."""
        self._has_begun = True

    def refuse_coming(self) -> None:
        """Refuse the requests whose body is incomplete, since slow clients would delay the shutdown. Called in their
        event loop, repeatedly once draining has begun.
        """
        for scope in self._coming:
            scope.cancel()

    def cut_off(self) -> int:
        """Cancel the running requests, and return how many there are. Called in their event loop."""
        self.begin()
        self._is_over = True
        for scope in self._under_way:
            scope.cancel()
        return len(self._under_way)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request as running within this context, which :meth:`cut_off` cancels."""
        with anyio.CancelScope() as scope:
            self._under_way.add(scope)
            try:
                yield
            finally:
                self._under_way.discard(scope)

    @contextmanager
    def coming(self) -> Iterator[anyio.CancelScope]:
        """Receive a request's body within this context, which :meth:`refuse_coming` cancels.

        :returns: the context's cancel scope
        """
        with anyio.CancelScope() as scope:
            self._coming.add(scope)
            try:
                yield scope
            finally:
                self._coming.discard(scope)

    @property
    def refusal(self) -> Problem:
        """Return the error for a request that arrives after draining has begun."""
        return _problem("takes no more requests")

    @property
    def interruption(self) -> Problem:
        """Return the error for a request that is cut off."""
        return _problem("did not finish this")


def _problem(what: str) -> Problem:
    return Problem(
        status=503,
        message=f"the server is ending, and {what}",
        type="server_error",
        code="unavailable",
        headers={"Connection": "close", "Retry-After": "5"},
    )

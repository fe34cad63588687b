"""Hold a connection to a client, and end those that keep the server waiting for a request."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Connection"]

HEAD_SECONDS: Final = 30.0
"""A request's line and headers take one packet or two: who needs longer holds a place that others could have."""


class Connection(H11Protocol):
    """Is uvicorn's, which waits without an end for the first byte and for the rest of a request's headers.

    Of uvicorn's two it is h11's, also where httptools is installed, as Ray and ``uvicorn[standard]`` do: that one loses
    the body of a request that offers HTTP/2, as all of Java's do, cuts streams into chunks for HTTP/1.0, which knows
    none, and takes headers without a limit.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._forget()

    def _watch(self) -> None:
        """Have the timer run while a request is due whose headers are not all there."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _forget(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

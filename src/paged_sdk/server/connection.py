"""Closes connections whose client does not send a request in time."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Connection"]

HEAD_SECONDS: Final = 30.0
"""Time for a request's line and headers, which take a packet or two: slow clients would use up connections."""


class Connection(H11Protocol):
    """Adds a timeout to uvicorn's protocol, which waits forever for the first byte and the rest of a request's headers.

    uvicorn has two protocols. This is always the one on h11, even if httptools is installed, as by Ray and
    ``uvicorn[standard]``: the one on httptools loses the body of a request that offers HTTP/2, as all of Java's do,
    sends chunked streams to HTTP/1.0 clients, which cannot read them, and accepts headers of any size.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's signature
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._forget()

    def _watch(self) -> None:
        """Run the timer while the server waits for a request's headers, and stop it while a request is answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _forget(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

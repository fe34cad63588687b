"""Detect lost ranks by idle TCP connections to rank 0, which break when a process or its machine is gone."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from paged_sdk.system.threads import thread_must_start

__all__ = ["Lifelines", "attach", "listen", "welcome"]

TOKEN_BYTES: Final = 16
_RANK_BYTES: Final = 4
# A machine that stops answering counts as lost after 4 seconds. No data is ever sent: with unacknowledged data, the
# system would retransmit for a quarter of an hour instead of probing.
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
_GREETING_SECONDS: Final = 3.0


def listen(address: str) -> socket.socket:
    """Listen for the other ranks on any free port.

    :param address: this machine's address
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=128)


def welcome(listener: socket.socket, token: bytes) -> tuple[int, socket.socket] | None:
    """Accept a pending connection and return its rank and socket; None if none is pending or the token is wrong.

    :param token: the secret that a rank sends first
    """
    listener.setblocking(False)
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    connection.settimeout(_GREETING_SECONDS)
    greeting = b""
    with suppress(OSError):
        while len(greeting) < TOKEN_BYTES + _RANK_BYTES and (part := connection.recv(TOKEN_BYTES + _RANK_BYTES)):
            greeting += part
    if greeting[:TOKEN_BYTES] != token or len(greeting) != TOKEN_BYTES + _RANK_BYTES:
        connection.close()
        return None
    return int.from_bytes(greeting[TOKEN_BYTES:], "big"), connection


def attach(address: str, port: int, token: bytes, rank: int) -> socket.socket:
    """Connect to rank 0.

    :raises OSError: rank 0 cannot be reached
    """
    connection = socket.create_connection((address, port), _GREETING_SECONDS)
    connection.sendall(token + rank.to_bytes(_RANK_BYTES, "big"))
    return connection


class Lifelines:
    """Watches connections in a thread until one breaks.

    :param connections: sockets by the rank at the other end
    :param on_break: called once, with the rank whose connection breaks first
    """

    def __init__(self, connections: Mapping[int, socket.socket], on_break: Callable[[int], None]) -> None:
        self._connections = connections
        self._on_break = on_break
        self._is_closing = False
        for connection in connections.values():
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE.items():
                if hasattr(socket, name):  # not on every operating system
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._waker, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="paged-sdk lifelines", daemon=True)
        with thread_must_start("to watch over the other ranks in"):
            self._thread.start()

    def close(self, seconds: float = 0.0) -> None:
        """Close the connections; a second call does nothing.

        :param seconds: how long to wait for the other ranks to close theirs first
        """
        if self._is_closing:
            return
        self._is_closing = True
        self._waker.close()  # wakes the thread
        if self._thread is not threading.current_thread():
            self._thread.join()
        limit = time.monotonic() + seconds
        for connection in self._connections.values():
            with suppress(OSError):  # broken, or not closed in time
                connection.settimeout(max(limit - time.monotonic(), 1e-3))
                connection.recv(1)
            connection.close()
        self._wake.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            ready = selector.select()
        broken = [key.data for key, _ in ready if key.data is not None]
        if broken and not self._is_closing:
            self._on_break(broken[0])

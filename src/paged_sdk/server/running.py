"""Runs the application on a socket until a signal ends the process."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Final

import uvicorn

from paged_sdk.server.app import ModelServer
from paged_sdk.server.connection import Connection

__all__ = ["allow_connections", "is_loopback", "listen", "run"]

BACKLOG: Final = 2048
KEEP_ALIVE_SECONDS: Final = 60
"""Clients, OpenAI's among them, reuse idle connections for 5 seconds. The server must keep them longer, or it closes
some just as a request is sent.
"""
MAX_OPEN_FILES: Final = 65536
SILENCE: Final[Mapping[str, int]] = {
    "TCP_KEEPIDLE": 60,  # seconds without packets from the client before the first probe
    "TCP_KEEPINTVL": 15,  # seconds between probes
    "TCP_KEEPCNT": 4,  # probes without an answer before the connection is closed
    "TCP_USER_TIMEOUT": 300_000,  # milliseconds that sent data may stay unacknowledged
}
"""Socket options that close connections of clients that are gone or never read. Options that the system does not have
are skipped.
"""
GRACE_SECONDS: Final = 1
"""How long connections may take to close once requests have been drained."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a host and port. Port 0 selects a free port; host ``::`` listens on all
    addresses, IPv4 included.

    :raises OSError: unknown host, or the port is taken
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    takes_both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    listener = socket.create_server((address[0], port), family=family, backlog=BACKLOG, dualstack_ipv6=takes_both)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit these options
    for name, value in SILENCE.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return listener


def allow_connections() -> None:
    """Raise the process's limit of open files, by default 1,024, to the system's hard limit or 65,536."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_loopback(host: str) -> bool:
    """Tell whether all addresses of a host are loopback addresses, which other machines cannot reach.

    :raises OSError: unknown host
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


async def run(app: ModelServer, listener: socket.socket, on_start: Callable[[], None] = lambda: None) -> int:
    """Serve until SIGTERM or Ctrl-C, then refuse new requests and let running ones finish. A second signal cuts these
    off at once.

    :param on_start: called once the server accepts requests and handles signals
    :returns: how many requests were cut off
    """
    config = uvicorn.Config(
        app,
        http=Connection,
        lifespan="on",
        access_log=False,
        log_config=None,
        ws="none",
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    server = _DrainingServer(config, app, on_start)
    await server.serve(sockets=[listener])
    return server.cut_off


class _DrainingServer(uvicorn.Server):
    """Drains before it shuts down: it accepts connections and refuses their requests until the running ones have
    finished.

    :ivar cut_off: how many requests did not finish in time
    """

    def __init__(self, config: uvicorn.Config, app: ModelServer, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._app = app
        self._on_start = on_start
        self._deadline = 0.0
        self.cut_off = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = self._app.drain.has_begun
        self._app.drain.begin()

    async def on_tick(self, counter: int) -> bool:
        drain = self._app.drain
        if drain.has_begun:
            drain.refuse_coming()
            self._deadline = self._deadline or time.monotonic() + self._app.settings.drain_timeout
            if self.should_exit or not drain.in_flight or time.monotonic() > self._deadline:
                self.cut_off = drain.cut_off()
                return True
        return await super().on_tick(counter)

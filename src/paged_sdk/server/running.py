"""Run the application on a socket until the process is told to end."""

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
"""Clients keep connections for 5 seconds, OpenAI's among them: one that ends them as soon cuts requests off."""
MAX_OPEN_FILES: Final = 65536
SILENCE: Final[Mapping[str, int]] = {
    "TCP_KEEPIDLE": 60,  # seconds without a sign of the client, after which the system asks for one,
    "TCP_KEEPINTVL": 15,  # this often,
    "TCP_KEEPCNT": 4,  # and so many times; and
    "TCP_USER_TIMEOUT": 300_000,  # milliseconds in which it takes nothing of what was sent
}
"""A client whose machine is gone, or that never reads, holds its connection no longer than this. Not every system has
all of these.
"""
GRACE_SECONDS: Final = 1
"""Connections whose requests were given time already get so long to close."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that takes connections; 0 as a port is any that is free. The host ``::`` is every address, those
    of IPv4 too.

    :raises OSError: there is no such host, or the port is taken
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    takes_both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    listener = socket.create_server((address[0], port), family=family, backlog=BACKLOG, dualstack_ipv6=takes_both)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit all of it
    for name, value in SILENCE.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return listener


def allow_connections() -> None:
    """Let the process hold as many connections as the system allows it: by default it is 1,024 open files."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine alone, for others cannot reach it.

    :raises OSError: there is no such host
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


async def run(app: ModelServer, listener: socket.socket, on_start: Callable[[], None] = lambda: None) -> int:
    """Serve until SIGTERM or Ctrl-C, then let requests under way finish and refuse others. A second signal ends it at
    once.

    :param on_start: called when requests are answered and signals are heeded
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
    """Ends in two steps: connections are taken, and their requests refused, until those under way have finished.

    :ivar cut_off: requests that had not finished in time
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

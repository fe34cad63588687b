"""Run the application on a socket until the process is told to end."""

from __future__ import annotations

import ipaddress
import signal
import socket
import time
from types import FrameType
from typing import Final

import uvicorn

from paged_sdk.server.app import ModelServer

__all__ = ["is_loopback", "listen", "run"]

BACKLOG: Final = 2048
KEEP_ALIVE_SECONDS: Final = 60
"""Clients keep connections for 5 seconds, OpenAI's among them: one that ends them as soon cuts requests off."""
GRACE_SECONDS: Final = 1
"""Connections whose requests were given time already get so long to close."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that takes connections; 0 as a port is any that is free.

    :raises OSError: there is no such host, or the port is taken
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server((address[0], port), family=family, backlog=BACKLOG)


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine alone, for others cannot reach it.

    :raises OSError: there is no such host
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


async def run(app: ModelServer, listener: socket.socket) -> int:
    """Serve until SIGTERM or Ctrl-C, then let requests under way finish and refuse others. A second signal ends it at
    once.

    :returns: how many requests were cut off
    """
    config = uvicorn.Config(
        app,
        lifespan="on",
        access_log=False,
        log_config=None,
        ws="none",
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    server = _DrainingServer(config, app)
    await server.serve(sockets=[listener])
    return server.cut_off


class _DrainingServer(uvicorn.Server):
    """Ends in two steps: connections are taken, and their requests refused, until those under way have finished.

    :ivar cut_off: requests that had not finished in time
    """

    def __init__(self, config: uvicorn.Config, app: ModelServer) -> None:
        super().__init__(config)
        self._app = app
        self._deadline = 0.0
        self.cut_off = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._app.drain.has_begun:
            self.should_exit = True
            self.force_exit = sig == signal.SIGINT
        self._app.drain.begin()

    async def on_tick(self, counter: int) -> bool:
        drain = self._app.drain
        if drain.has_begun:
            self._deadline = self._deadline or time.monotonic() + self._app.settings.drain_timeout
            if self.should_exit or not drain.in_flight or time.monotonic() > self._deadline:
                self.cut_off = drain.in_flight
                return True
        return await super().on_tick(counter)

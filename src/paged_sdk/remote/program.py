"""Runs in a replica's process: builds a model, and serves its engine to the process that started this one."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
from typing import Final, NoReturn

import anyio

from paged_sdk.build.child_process import end_with_parent
from paged_sdk.errors import ConfigError
from paged_sdk.model import Model
from paged_sdk.remote.channel import Channel
from paged_sdk.remote.face import pack_face
from paged_sdk.remote.host import EngineHost
from paged_sdk.remote.link import Parcel
from paged_sdk.remote.packing import pack, unpack
from paged_sdk.remote.sent_error import SentError
from paged_sdk.remote.starting import Assignment, Built, Failed, LogLine
from paged_sdk.system.processors import pin_thread
from paged_sdk.worker.worker import Worker

__all__ = ["main"]

_LOST: Final = 3
"""The exit status if the other process is gone."""


def main() -> NoReturn:
    """Build a model and serve it over a socket, which is the standard input, until the socket is closed."""
    os.dup2(2, 1)  # what libraries print goes to standard error
    channel = Channel(socket.socket(fileno=os.dup(0)))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # libraries that read standard input must not read messages
    end_with_parent(_LOST)  # a forked child of the parent may keep the connection open
    first = channel.read()
    if first is None:
        os._exit(_LOST)
    assignment: Assignment = unpack(first)
    pin_thread(assignment.processors)
    _forward_logs(channel, assignment.log_level)
    anyio.run(_serve, channel, assignment)
    os._exit(0)  # nothing is left to clean up, and the other process waits for this exit


async def _serve(channel: Channel, assignment: Assignment) -> None:
    reader = _Reader(channel)
    try:
        model = await _built(assignment)
    except BaseException as error:
        channel.write(pack(Failed(SentError.of(error))))
        return
    insides = model._insides
    channel.write([*pack(Built()), *pack_face(insides, with_preparer=assignment.wants_preparer)])
    host = EngineHost(insides, channel.write)
    reader.begin(host)
    await host.serve()
    await model.aclose()


async def _built(assignment: Assignment) -> Model:
    try:
        builder = pickle.loads(assignment.builder)
    except Exception as error:  # of any kind, such as a class of __main__
        raise ConfigError(
            f"a replica's process cannot make its builder: {error}",
            setting="replicas",
            allowed="builders whose class and values can be imported, which those of __main__ cannot",
        ) from error
    model = await builder.build()
    if not isinstance(model, Model) or not isinstance(model._insides.worker, Worker):
        raise ConfigError.of("replicas", model, "builders of a model with an engine of its own")
    return model


class _Reader:
    """Reads the other process's messages, and exits this process when the other is gone."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._host: EngineHost | None = None
        self._early: list[Parcel] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="paged-sdk reader", daemon=True).start()

    def begin(self, host: EngineHost) -> None:
        """Pass messages to the host from now on, after those that were received earlier."""
        with self._lock:
            self._host = host
            for parcel in self._early:
                host.receive(parcel)

    def _run(self) -> None:
        while (parcel := self._channel.read()) is not None:
            with self._lock:
                if self._host is None:
                    self._early.append(parcel)
                else:
                    self._host.receive(parcel)
        os._exit(_LOST)


def _forward_logs(channel: Channel, level: int) -> None:
    logger = logging.getLogger(__name__.partition(".")[0])
    logger.setLevel(level)
    logger.addHandler(_Forwarding(channel))
    logger.propagate = False


class _Forwarding(logging.Handler):
    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._channel.write(pack(LogLine.of(record)))
        except Exception:  # of any kind, such as a closed connection
            self.handleError(record)

"""The program of a replica's process: builds a model, and serves its engine to the process that has started it."""

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
from paged_sdk.system.processors import keep_on
from paged_sdk.worker.worker import Worker

__all__ = ["main"]

_LOST: Final = 3
"""The exit status where the other process has gone."""


def main() -> NoReturn:
    """Build and serve what is asked for through a socket, the standard input, until that is closed."""
    os.dup2(2, 1)  # what others print is not the program's output
    channel = Channel(socket.socket(fileno=os.dup(0)))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # what others read is not the application's messages
    end_with_parent(_LOST)  # whose connection a forked child of it may hold open
    first = channel.read()
    if first is None:
        os._exit(_LOST)
    assignment: Assignment = unpack(first)
    keep_on(assignment.processors)
    _forward_logs(channel, assignment.log_level)
    anyio.run(_serve, channel, assignment)
    os._exit(0)  # nothing is left to be tidied up, and nothing that others wait for is to take time


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
    """Reads what the other process sends. When that has gone, this one goes, too."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._host: EngineHost | None = None
        self._early: list[Parcel] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="paged-sdk reader", daemon=True).start()

    def begin(self, host: EngineHost) -> None:
        """Give the host what comes from now on, and what has come before."""
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
        except Exception:  # of any kind: nobody hears it
            self.handleError(record)

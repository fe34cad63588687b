"""Run a model's engine in a process of its own."""

from __future__ import annotations

import logging
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

import anyio
from attrs import frozen

from paged_sdk.build.child_process import Child, how_it_ended, start_program
from paged_sdk.calls.preparation import RequestPreparer
from paged_sdk.config.hang_limits import HangLimits
from paged_sdk.errors import ConfigError, ModelLoadError
from paged_sdk.logs import get_logger
from paged_sdk.remote.channel import Channel
from paged_sdk.remote.engine import RemoteEngine
from paged_sdk.remote.face import Face, RemoteModel, unpack_face
from paged_sdk.remote.hang_detector import HangDetector
from paged_sdk.remote.link import Parcel
from paged_sdk.remote.messages import FromEngine, Ping, Pong
from paged_sdk.remote.packing import pack, unpack
from paged_sdk.remote.starting import Assignment, BeforeBuilt, Built, Failed, LogLine
from paged_sdk.system.event_loop import wait_until_done
from paged_sdk.system.owner import Owner
from paged_sdk.system.threads import in_own_thread, thread_must_start

__all__ = ["BuildReply", "EngineProcess", "ProcessModel"]

_log = get_logger(__name__)

_SEEN_SECONDS: Final = 2.0
"""How long to wait for a process's exit status, and for its threads here, once its connection is closed."""
_KILLED_SECONDS: Final = 30.0
"""How long to wait for the exit of a killed process. If it is blocked in a device driver, it exits later."""


@frozen(eq=False)
class BuildReply:
    """Holds what the process sent after building its model.

    :ivar preparer: prepares requests for the model; None if it was not requested
    """

    face: Face
    preparer: RequestPreparer | None
    engine: RemoteEngine


class EngineProcess:
    """Starts a process that builds a model, and carries messages to its engine (a
    :class:`~paged_sdk.remote.link.Link`).

    The process ends when its engine is closed, or when this process ends in any way. It inherits this process's
    environment, and can import the same modules. Once its model is built, it is pinged regularly, and killed if it
    hangs.

    :param builder: builds the model in the process
    :param name: names the replica in errors
    :param wants_preparer: whether the process should send what prepares requests: tokenizer, chat template and so on
    :param hang_limits: when the process counts as hung
    :param processors: the processors that it runs on; None: any
    :raises ConfigError: the builder cannot be pickled, or the system is Windows
    :raises EngineError: the system refuses to start another process or thread
    """

    def __init__(
        self,
        builder: object,
        *,
        name: str,
        wants_preparer: bool,
        hang_limits: HangLimits,
        processors: Collection[int] | None = None,
    ) -> None:
        if sys.platform == "win32":
            raise ConfigError.of("in_processes", True, "False on Windows")
        level = logging.getLogger("paged_sdk").getEffectiveLevel()
        assignment = Assignment(
            builder=_pickled(builder), log_level=level, wants_preparer=wants_preparer, processors=processors
        )
        self._name = name
        self._owner = Owner()
        self._built: Future[BuildReply] = Future()
        self._engine: RemoteEngine | None = None
        self._hang_detector = HangDetector(hang_limits)
        self._why_killed: str | None = None
        self._is_over = threading.Event()
        self._outgoing: SimpleQueue[Parcel | None] = SimpleQueue()
        own, other = socket.socketpair()
        try:
            with other:
                # The whole environment is inherited, since the process builds as the application would.
                self._process = start_program("paged_sdk.remote.program", what="a replica", stdin=other)
        except BaseException:
            own.close()
            raise
        self._channel = Channel(own)
        self._finalizer = weakref.finalize(self, _end, self._process, self._channel, self._owner)
        self._writer = threading.Thread(target=self._write, name="paged-sdk replica out", daemon=True)
        self._reader = threading.Thread(target=self._read, name="paged-sdk replica in", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="paged-sdk replica watch", daemon=True)
        self.send(pack(assignment))
        try:
            with thread_must_start("to talk to a replica in"):
                self._reader.start()
                self._writer.start()
                self._watcher.start()
        except BaseException:
            self.end()
            self._channel.release()
            raise

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    async def built(self) -> BuildReply:
        """Wait until the model is built.

        :raises PagedError: building the model has failed
        :raises ModelLoadError: the process ended before the model was built
        """
        await wait_until_done(self._built)
        return self._built.result()

    def send(self, parcel: Parcel) -> None:
        self._outgoing.put(parcel)

    def join(self, timeout: float | None = None) -> bool:
        if self._reader is not threading.current_thread():
            self._reader.join(timeout)
        return not self._reader.is_alive()

    def end(self) -> None:
        """Kill the process if it has not ended. Idempotent."""
        if self._owner.is_here:
            self._finalizer()
            for thread in (self._reader, self._writer, self._watcher):
                if thread.ident is not None and thread is not threading.current_thread():
                    thread.join(_SEEN_SECONDS)

    # On this object's threads

    def _write(self) -> None:
        try:
            while (parcel := self._outgoing.get()) is not None:
                self._channel.write(parcel)
        except OSError:  # the process is gone, which the reader handles
            pass

    def _read(self) -> None:
        try:
            while (parcel := self._channel.read()) is not None:
                self._take(parcel)
        except BaseException as error:
            reason = f"what it sends cannot be read: {error!r}"
            _log.exception("%s: %s", self._full_name, reason)
        else:
            reason = self._why_killed or self._how_it_ended()
        _kill(self._process, self._channel, self._owner)
        self._channel.release()
        self._outgoing.put(None)
        self._is_over.set()
        with suppress(InvalidStateError):
            self._built.set_exception(ModelLoadError(f"{self._full_name} could not build its model: {reason}"))
        if self._engine is not None:
            self._engine.lost(reason)  # before waiting for the process's exit
        _end(self._process, self._channel, self._owner)

    def _watch(self) -> None:
        while not self._is_over.wait(self._hang_detector.round_seconds):
            self._look()

    def _look(self) -> None:
        """Ping the process, or kill it if it hangs."""
        # Loading a model may take any time. Once killed, the process is not judged again, whatever it still sends.
        if self._engine is None or self._is_over.is_set():
            return
        self._why_killed = self._hang_detector.next_round()
        if self._why_killed is None:
            self.send(pack(Ping()))
        else:
            _kill(self._process, self._channel, self._owner)
            self._is_over.set()

    def _take(self, parcel: Parcel) -> None:
        self._hang_detector.note()
        message: BeforeBuilt | FromEngine = unpack(parcel)
        match message:
            case Pong(running_step):
                self._hang_detector.note_step(running_step)
            case LogLine(logger, level, text):
                to = logging.getLogger(logger)
                if to.isEnabledFor(level):
                    to.log(level, "%s: %s", self._name, text)
            case Built():
                face, preparer = unpack_face(parcel[1:])
                engine = RemoteEngine(self, name=self._full_name, stats=face.stats, adapters=face.adapters)
                self._engine = engine
                self._built.set_result(BuildReply(face, preparer, engine))
            case Failed(error):
                self._built.set_exception(error.received())
            case _:
                assert self._engine is not None, "its model is built"
                self._engine.take(message)

    @property
    def _full_name(self) -> str:
        return f"{self._name} (process {self._process.pid})"

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_SEEN_SECONDS)
        except subprocess.TimeoutExpired:
            return "it has closed its connection"
        return f"it has ended with {how_it_ended(status)}"


class ProcessModel(RemoteModel):
    """Serves a model whose engine runs in a process of its own."""

    def __init__(self, process: EngineProcess, reply: BuildReply, preparer: RequestPreparer) -> None:
        super().__init__(reply.face, preparer, reply.engine, is_near=True)
        self._process = process

    @property
    def pid(self) -> int:
        """Return the id of the engine's process."""
        return self._process.pid

    async def aclose(self, *, drain: bool = False) -> None:
        await super().aclose(drain=drain)
        with anyio.CancelScope(shield=True):
            await in_own_thread(self._process.end, "to end a replica in")


def _pickled(builder: object) -> bytes:
    try:
        return pickle.dumps(builder)
    except Exception as error:  # of any kind, from classes of the application
        allowed = "builders whose values can be sent to another process"
        raise ConfigError.of("replicas", builder, allowed) from error


def _kill(process: Child, channel: Channel, owner: Owner) -> None:
    """Kill a process, without waiting for its exit. Does nothing in a forked child of the owner."""
    if owner.is_here:
        channel.close()
        process.kill()


def _end(process: Child, channel: Channel, owner: Owner) -> None:
    """Kill a process and wait for its exit. Does nothing in a forked child of the owner."""
    _kill(process, channel, owner)
    if owner.is_here:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_SECONDS)

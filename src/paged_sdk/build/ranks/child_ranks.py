"""Starts and watches the processes of the other ranks."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
from attrs import evolve, frozen
from torch._C._distributed_c10d import FileStore

from paged_sdk.build.child_process import how_it_ended, start_program
from paged_sdk.build.loading import Loading
from paged_sdk.build.ranks.ranks import RankPlacement
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.env import Environment, device_variables, interpreter_variables
from paged_sdk.errors import EngineDeadError, EngineError, ModelLoadError
from paged_sdk.kernels.native.library import load
from paged_sdk.kernels.native.ranks import make_shared_memory
from paged_sdk.logs import get_logger
from paged_sdk.parallel.group import Group
from paged_sdk.system.owner import Owner
from paged_sdk.system.threads import thread_must_start

__all__ = ["GROUP_LOST", "READY", "Assignment", "ChildRanks"]

_log = get_logger(__name__)

READY: Final = b"ready\n"
GROUP_LOST: Final = 3
"""Exit status of a rank that ended because another rank did."""

_POLL_SECONDS: Final = 0.1
# How long to wait, after a rank's connections have closed, until the system reports that its process has ended.
_SEEN_SECONDS: Final = 2.0
_MOST_TEXT: Final = 64 * 1024


@frozen(kw_only=True)
class Assignment:
    """Tells a follower what to load and how to find the other ranks.

    :ivar path: the model's files
    :ivar processors: the CPUs that its threads are pinned to; None: any
    :ivar rendezvous: a directory that all ranks see
    :ivar shared: file descriptor of the ranks' shared memory; None: no shared memory
    """

    path: Path
    settings: BuildSettings
    environment: Environment
    processors: frozenset[int] | None
    rank: int
    size: int
    rendezvous: Path
    shared: int | None


class ChildRanks:
    """Implements :class:`~paged_sdk.build.ranks.followers.Ranks` for processes that this process starts.

    :param loading: what this process loads
    :param placements: where each rank computes
    :raises EngineError: a process cannot be started
    :ivar group: all ranks; this process is rank 0
    """

    def __init__(self, loading: Loading, placements: Sequence[RankPlacement]) -> None:
        size, device = len(placements), loading.device
        self.group: Group = Group(0, size, self._explain)
        self._rendezvous = _rendezvous()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._owner = Owner()
        self._said = [b""] * size
        self._finalizer = weakref.finalize(self, _end, self._processes, self._rendezvous, self._owner, seconds=0.0)
        self._watcher: threading.Thread | None = None
        given = evolve(loading.settings, logging=False, throughput_logging=False)
        library = load()
        self._device = device
        shared = None if library is None or device.type != "cpu" else make_shared_memory(library, size)
        try:
            if library is not None and shared is not None:
                self.group.share(library, shared)
            for rank in range(1, size):
                assignment = Assignment(
                    path=loading.path,
                    settings=placements[rank].of(given),
                    processors=placements[rank].processors,
                    environment=loading.environment,
                    rank=rank,
                    size=size,
                    rendezvous=Path(self._rendezvous.name),
                    shared=shared,
                )
                self._processes.append(_start(pickle.dumps(assignment), () if shared is None else (shared,), device))
        except BaseException:
            self._finalizer()
            raise
        finally:
            if shared is not None:
                os.close(shared)

    def check(self) -> None:
        """Check that all ranks are still loading.

        :raises ModelLoadError: a rank has ended
        """
        self._hear(0.0)

    def join(self, check_cancelled: Callable[[], None]) -> None:
        """Wait until all ranks have loaded their shards, and connect to them.

        :param check_cancelled: called regularly; an exception that it raises ends the wait
        :raises ModelLoadError: a rank has ended
        """
        while self._loading:
            self._hear(_POLL_SECONDS)
            check_cancelled()
        self.group.join(FileStore(str(Path(self._rendezvous.name) / "ranks"), self.group.size), device=self._device)
        self._rendezvous.cleanup()
        self.group.use_pipes([process.stdin.fileno() for process in self._processes if process.stdin is not None])
        self._watcher = threading.Thread(target=self._watch, name="paged-sdk ranks", daemon=True)
        with thread_must_start("to watch over the other ranks in"):
            self._watcher.start()

    def end(self, seconds: float, error: BaseException | None) -> None:
        """End the processes; a second call does nothing.

        :param seconds: how long to wait for the processes to end before killing them
        :param error: not used: the processes need not know it
        """
        if self._finalizer.detach() is not None:
            _end(self._processes, self._rendezvous, self._owner, seconds=seconds, watcher=self._watcher)

    @property
    def _loading(self) -> list[int]:
        """Return the ranks that have not reported yet that they have loaded their shards."""
        return [rank for rank in range(1, self.group.size) if READY not in self._said[rank]]

    def _hear(self, seconds: float) -> None:
        """Read messages of ranks that are loading.

        :raises ModelLoadError: a rank has ended
        """
        if ended := self._listen(seconds):
            raise ModelLoadError(f"the model cannot be loaded: {self._end_of(ended[0])}")

    def _process(self, rank: int) -> subprocess.Popen[bytes]:
        return self._processes[rank - 1]

    def _listen(self, seconds: float | None) -> list[int]:
        """Read the followers' messages, and return the ranks that have ended.

        :param seconds: how long to wait for messages; None: until there are some
        """
        ended = []
        ranks: dict[int, int] = {}
        messages = select.poll()  # select() refuses descriptors above 1023, which a server with many sockets has
        for rank, process in enumerate(self._processes, 1):
            assert process.stdout is not None
            ranks[process.stdout.fileno()] = rank
            messages.register(process.stdout, select.POLLIN)
        for pipe, _ in messages.poll(None if seconds is None else 1000 * seconds):
            content, rank = os.read(pipe, _MOST_TEXT), ranks[pipe]
            if content:
                self._said[rank] += content
            else:  # the pipe is closed: the process is about to end
                with suppress(subprocess.TimeoutExpired):
                    self._process(rank).wait(_SEEN_SECONDS)
                ended.append(rank)
        return ended

    def _watch(self) -> None:
        """Wait until a follower ends, then end the waits of other ranks in shared memory."""
        while not self._listen(None):
            pass
        self.group.end()

    def _explain(self, error: RuntimeError) -> Exception:
        """Return the error for a failed call of the group: it names the rank that ended first, if any."""
        limit = time.monotonic() + _SEEN_SECONDS
        while True:
            ended = [rank for rank in range(1, self.group.size) if self._process(rank).poll() is not None]
            first = next((rank for rank in ended if self._process(rank).returncode != GROUP_LOST), None)
            if first is not None or time.monotonic() > limit:
                break
            time.sleep(0.01)
        if first is None:
            return EngineDeadError(f"the connection between ranks broke: {error}")
        if self._watcher is not None:
            self._watcher.join(_SEEN_SECONDS)  # so that the rank's error message has been read
        return EngineDeadError(self._end_of(first))

    def _end_of(self, rank: int) -> str:
        """Describe how a rank has ended."""
        process = self._process(rank)
        how = f"process {process.pid} ended with {how_it_ended(process.returncode)}"
        text = self._said[rank].replace(READY, b"").decode("utf-8", "replace").strip()
        return f"rank {rank} of {self.group.size} has ended: {how}" + (f": {text}" if text else "")


def _rendezvous() -> TemporaryDirectory[str]:
    """Make a temporary directory for the ranks' rendezvous.

    :raises EngineError: it cannot be made, for example in a container with a read-only file system
    """
    try:
        return TemporaryDirectory(prefix="paged-sdk-")
    except OSError as error:
        raise EngineError(
            f"the ranks of a model find each other by a temporary file, and none can be made: {error}; TMPDIR names "
            "the directory"
        ) from error


def _start(assignment: bytes, files: Sequence[int], device: torch.device) -> subprocess.Popen[bytes]:
    process = start_program(
        "paged_sdk.build.ranks.follower",
        what="another rank",
        files=files,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env=interpreter_variables() | ({} if device.type == "cpu" else device_variables()),
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # join() reports how the process ended
        process.stdin.write(len(assignment).to_bytes(8, "big") + assignment)
    return process


def _end(
    processes: Sequence[subprocess.Popen[bytes]],
    rendezvous: TemporaryDirectory[str],
    owner: Owner,
    *,
    seconds: float,
    watcher: threading.Thread | None = None,
) -> None:
    """End processes and remove the rendezvous directory; in a forked child, do nothing.

    :param seconds: how long to wait for the processes to end before killing them
    """
    if not owner.is_here:
        return
    limit = time.monotonic() + seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(limit - time.monotonic(), 0))
        process.kill()
        process.wait()
    if watcher is not None:
        watcher.join(_SEEN_SECONDS)  # it reads the pipes that are closed below
    for process in processes:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
    rendezvous.cleanup()

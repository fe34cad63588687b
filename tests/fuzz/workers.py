"""Run cases in forked processes, which may crash or hang: each does one case after the other under a memory limit."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from attrs import frozen

from fuzz.targets import Target
from paged_sdk.errors import PagedError

__all__ = ["Case", "Find", "Report", "run_case", "run_cases"]

_SLOT: Final = struct.Struct("<qdqq")  # the case under way, when it began, cases done, cases refused
_MEMORY: Final = 2 << 30  # bytes that a case may take beside what the process has already


@frozen
class Case:
    """Names one case; the same name always is the same files."""

    target: str
    seed: int
    index: int

    def random(self) -> random.Random:
        """Return the numbers that the case is made from."""
        return random.Random(f"{self.target} {self.seed} {self.index}")


@frozen
class Find:
    """Says what a case did that no file may do."""

    case: Case
    what: str


@frozen(kw_only=True)
class Report:
    """Counts the cases: how many were done, and how many of them refused; the others loaded."""

    done: int
    refused: int
    slowest: float
    finds: tuple[Find, ...]


def run_case(target: Target, case: Case, directory: Path) -> bool:
    """Run one case in this process; return whether the checkpoint was refused.

    :raises BaseException: whatever the case raises that is no typed error
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    target.write(case.random(), directory)
    try:
        target.load(directory)
    except PagedError as error:
        text = str(error)
        text.encode()  # a message must be printable
        if len(text) > 4000:
            raise AssertionError(f"a message of {len(text)} characters") from error
        return True
    return False


def run_cases(
    targets: Sequence[Target], *, seed: int, first: int, count: int, workers: int, limit: float = 10.0
) -> Report:
    """Run many cases, spread over the targets by their shares.

    :param first: the index of the first case
    :param workers: how many processes
    :param limit: seconds of processor time that a case may take; on the clock it may take six times as long, since
        other programs may keep the machine busy
    """
    schedule = [target for target in targets for _ in range(target.share)]
    random.Random(seed).shuffle(schedule)
    slots = mmap.mmap(-1, workers * _SLOT.size)
    running: dict[int, int] = {}  # worker to process
    finds: list[Find] = []
    slowest = 0.0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        found = Path(folder) / "finds"
        for worker in range(workers):
            _SLOT.pack_into(slots, worker * _SLOT.size, first + worker - workers, 0.0, 0, 0)

        def start(worker: int) -> None:
            pid = os.fork()
            if pid == 0:
                _work(schedule, slots, worker, workers, seed, first + count, Path(folder) / str(worker), found, limit)
            running[worker] = pid

        def give_up(worker: int, what: str) -> None:
            index, _, done, refused = _SLOT.unpack_from(slots, worker * _SLOT.size)
            finds.append(Find(Case(schedule[index % len(schedule)].name, seed, index), what))
            _SLOT.pack_into(slots, worker * _SLOT.size, index, 0.0, done + 1, refused)
            start(worker)

        for worker in range(workers):
            start(worker)
        while running:
            time.sleep(0.02)
            for worker, pid in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                _, began, _, _ = _SLOT.unpack_from(slots, worker * _SLOT.size)
                if ended:
                    del running[worker]
                    if status:
                        give_up(worker, f"the process ended with {_words(status)}")
                elif began:
                    slowest = max(slowest, time.monotonic() - began)
                    if time.monotonic() - began > 6 * limit:
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                        del running[worker]
                        give_up(worker, f"it took more than {6 * limit:g} s")
        if found.exists():
            for line in found.read_text().splitlines():
                target, index, what = json.loads(line)
                finds.append(Find(Case(target, seed, index), what))
    counts = [_SLOT.unpack_from(slots, worker * _SLOT.size) for worker in range(workers)]
    done, refused = sum(each[2] for each in counts), sum(each[3] for each in counts)
    return Report(done=done, refused=refused, slowest=slowest, finds=tuple(finds))


def _work(
    schedule: Sequence[Target],
    slots: mmap.mmap,
    worker: int,
    step: int,
    seed: int,
    end: int,
    folder: Path,
    found: Path,
    limit: float,
) -> None:
    """Run every ``step``-th case from the one after the slot's, and leave the process."""
    faulthandler.disable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the tokenizers package writes its panics there
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE if os.path.exists("/proc") else 0
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    last, _, done, refused = _SLOT.unpack_from(slots, worker * _SLOT.size)
    for index in range(last + step, end, step):
        target = schedule[index % len(schedule)]
        _SLOT.pack_into(slots, worker * _SLOT.size, index, time.monotonic(), done, refused)
        signal.setitimer(signal.ITIMER_PROF, limit)  # when it has run down, SIGPROF ends the process
        try:
            refused += run_case(target, Case(target.name, seed, index), folder)
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {str(error)[:200]!r} at {Path(where.filename).name}:{where.lineno}"
            with found.open("a") as file:
                file.write(json.dumps([target.name, index, what]) + "\n")
        done += 1
        _SLOT.pack_into(slots, worker * _SLOT.size, index, 0.0, done, refused)
    os._exit(0)


def _words(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.WEXITSTATUS(status)}"

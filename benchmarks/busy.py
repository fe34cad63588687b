"""Run busy processes, to measure an engine under competing load."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from attrs import evolve

from benchmarks.process import EngineProcess
from benchmarks.prompts import PromptMaker
from benchmarks.tasks import Figures, Task

__all__ = ["Busy", "beside"]

_REPOSITORY: Final = Path(__file__).parents[1]
_LOOP: Final = "from benchmarks.worker import end_with_driver\nend_with_driver()\nprint(flush=True)\nwhile True: pass"
_SETTLING: Final = 0.1
"""Seconds for the kernel to spread the busy processes over CPUs before a measurement."""

_NAMES: Final = {0: "idle", 1: "beside one busy process", 2: "beside two"}


class Busy:
    """Holds processes that compute in a loop, and are stopped except within :meth:`computing`.

    :param most: number of processes; they end with the context
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Busy:
        for _ in range(self._most):
            command = [sys.executable, "-c", _LOOP]
            process = subprocess.Popen(command, cwd=_REPOSITORY, stdout=subprocess.PIPE, text=True)
            self._processes.append(process)
            assert process.stdout is not None
            process.stdout.readline()  # the process computes from now on
            process.send_signal(signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._processes.clear()

    @property
    def process_ids(self) -> list[int]:
        """Return the ids of the processes, in the order in which they are woken."""
        return [process.pid for process in self._processes]

    @contextmanager
    def computing(self, number: int) -> Iterator[None]:
        """Have ``number`` processes compute in this context."""
        woken = self._processes[:number]
        for process in woken:
            process.send_signal(signal.SIGCONT)
        try:
            if woken:
                time.sleep(_SETTLING)
            yield
        finally:
            for process in woken:
                process.send_signal(signal.SIGSTOP)


def beside(task: Task, busy: Busy, number: int) -> Task:
    """Return a task that measures the first figure of another task beside ``number`` busy processes."""
    first = task.metrics[0]
    metric = evolve(first, key=f"{first.key}_beside_{number}", title=f"{first.title}, {_NAMES[number]}")

    def measure(engine: EngineProcess, prompts: PromptMaker, key: str) -> Figures:
        with busy.computing(number):
            return {metric.key: task.measure(engine, prompts, key)[first.key]}

    return Task(f"{task.name}-beside-{number}", (metric,), measure)

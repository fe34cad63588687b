"""Run an engine's process: load the engine, then execute the driver's commands until stdin ends.

python -m benchmarks.worker ENGINE SETTINGS_AS_JSON
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from benchmarks.protocol import BenchmarkEngine, EngineSettings, Prompt, RequestTimes, UnsupportedError

__all__ = ["cpu_seconds", "end_with_driver", "engine_class", "main"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def engine_class(name: str) -> type[BenchmarkEngine]:
    """Return the class in ``engines/NAME.py``, which imports the engine's packages only when it is instantiated."""
    engine: type[BenchmarkEngine] = importlib.import_module(f"benchmarks.engines.{name}").Engine
    return engine


def peak_memory(process_id: int) -> int:
    """Return the peak resident set of a process, in bytes; without /proc, that of this process."""
    try:
        # Not ru_maxrss: on Linux it includes the parent's memory before exec.
        status = Path(f"/proc/{process_id}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cpu_seconds(process_id: int) -> float:
    """Return the CPU time of a process, over all threads."""
    if process_id == os.getpid():
        return time.process_time()
    # On Linux, the clock id of another process follows from its pid (include/linux/posix-timers_types.h). It is exact;
    # /proc counts hundredths of a second.
    return time.clock_gettime(~process_id << 3 | 2)


class _Worker:
    """Executes the driver's commands on one engine, and on a second one of its kind for :meth:`_on_two`."""

    def __init__(self, name: str, settings: EngineSettings) -> None:
        self._settings = settings
        self._engine = engine_class(name)(settings)
        self._second: BenchmarkEngine | None = None

    @property
    def version(self) -> str:
        return self._engine.version

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"result": self._do(command)}
        except UnsupportedError as error:
            return {"unsupported": str(error)}
        except Exception as error:
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {error}"}

    def _do(self, command: Mapping[str, Any]) -> Any:
        engine = self._engine
        prompts = [Prompt(**prompt) for prompt in command.get("prompts", ())]
        match command["do"]:
            case "generate":
                return _as_json(engine.generate(prompts, command["max_tokens"]))
            case "generate_on_two":
                others = [Prompt(**prompt) for prompt in command["others"]]
                return [_as_json(times) for times in self._on_two(prompts, others, command["max_tokens"])]
            case "event_loop_lag":
                return engine.event_loop_lag(prompts, command["max_tokens"], command["interval"])
            case "logits":
                logits = engine.logits(command["token_ids"], command["path"])
                logits.astype("<f4").tofile(command["output"])
                return list(logits.shape)
            case "peak_memory":
                return peak_memory(engine.process_id)
            case "idle_cpu":
                engine.generate(prompts, command["max_tokens"])
                return _idle_cpu(engine.process_id, command["after"], command["seconds"])
            case unknown:
                raise ValueError(f"no such command: {unknown!r}")

    def _on_two(
        self, prompts: list[Prompt], others: list[Prompt], max_tokens: int
    ) -> tuple[list[RequestTimes], list[RequestTimes]]:
        """Generate on two models in this process concurrently; the second one is loaded on the first call."""
        self._second = self._second or type(self._engine)(self._settings)
        ready = threading.Barrier(2)

        def generate(engine: BenchmarkEngine, batch: list[Prompt]) -> list[RequestTimes]:
            ready.wait()
            return engine.generate(batch, max_tokens)

        with ThreadPoolExecutor(1) as threads:
            second = threads.submit(generate, self._second, others)
            return generate(self._engine, prompts), second.result()


def _as_json(times: list[RequestTimes]) -> list[dict[str, Any]]:
    return [asdict(entry) for entry in times]


def _idle_cpu(process_id: int, after: float, seconds: float) -> float:
    """Return how many CPUs an idle process uses for ``seconds``, beginning in ``after`` seconds."""
    time.sleep(after)
    begun, before = time.perf_counter(), cpu_seconds(process_id)
    time.sleep(seconds)
    return (cpu_seconds(process_id) - before) / (time.perf_counter() - begun)


def _take_stdout() -> IO[str]:
    """Redirect stdout to stderr, because libraries may print, and return the driver's pipe."""
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return pipe


def end_with_driver() -> None:
    """On Linux, let the kernel kill this process when its parent ends, since a stopped process would not notice the end
    of its input.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(name: str, settings: str) -> None:
    """Load, then answer a line for each line of stdin."""
    end_with_driver()
    with _take_stdout() as replies:

        def reply(message: dict[str, Any]) -> None:
            print(json.dumps(message), file=replies, flush=True)

        worker = _Worker(name, EngineSettings(**json.loads(settings)))
        reply({"result": worker.version})
        for line in sys.stdin:
            reply(worker.answer(json.loads(line)))


if __name__ == "__main__":
    main(*sys.argv[1:])

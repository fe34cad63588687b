"""Run an engine's process from the driver. It is stopped (SIGSTOP) except while it executes a command."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.environments import python_of
from benchmarks.protocol import EngineSettings, Prompt, RequestTimes, UnsupportedError
from benchmarks.worker import engine_class

__all__ = ["EngineFailedError", "EngineProcess"]

_REPOSITORY: Final = Path(__file__).parents[1]
_LOADING: Final = 600.0
_ENDING: Final = 10.0
_LOG_LINES: Final = 3


class EngineFailedError(Exception):
    """Raised if the engine raised, died or did not answer; the message says which."""


class EngineProcess:
    """Controls the process of a loaded engine. The constructor returns when the model is loaded.

    All engines of a round stay loaded and take turns. Between its turns, an engine computes nothing, spins on no lock
    and wakes no thread, because its processes are stopped.

    :param log: the file for everything that the engine prints
    :param timeout: seconds that one command may take; an engine that takes longer is ended
    :param source: a directory of packages that precede those of the engine's environment: another version of it
    :param apart: run the engine in a separate session: with ``sched_autogroup_enabled``, Linux divides CPU time among
        sessions first
    :param title: the name for its figures; None: the engine's
    :raises EngineFailedError: the engine could not be loaded
    """

    def __init__(
        self,
        name: str,
        settings: EngineSettings,
        log: Path,
        *,
        timeout: float,
        source: Path | None = None,
        title: str | None = None,
        apart: bool = False,
    ) -> None:
        self.name = title or name
        self._engine = name
        self.settings = settings
        self.started = time.perf_counter()
        self._log = log
        self._timeout = timeout
        self._source = source
        self._apart = apart
        threads = str(settings.num_threads)
        variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), threads)
        if settings.isa is not None:
            variables |= engine_class(name).ISAS[settings.isa]
        if source is not None:
            variables["PYTHONPATH"] = str(source)
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [python_of(name, settings.isa), "-m", "benchmarks.worker", name, json.dumps(asdict(settings))],
                cwd=_REPOSITORY,
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=apart,
                process_group=None if apart else 0,
            )
        try:
            self.version: str = self._read(_LOADING)
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def is_alive(self) -> bool:
        """Return False once the process has ended or was ended."""
        return self._process.poll() is None

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[RequestTimes]:
        """Call :meth:`BenchmarkEngine.generate`, and check that the result is what was requested.

        :raises UnsupportedError: the engine does not support it
        :raises EngineFailedError: the engine failed
        """
        result = self.ask("generate", prompts=_as_json(prompts), max_tokens=max_tokens)
        return _checked(result, len(prompts), max_tokens)

    def generate_on_two(
        self, prompts: Sequence[Prompt], others: Sequence[Prompt], max_tokens: int
    ) -> list[list[RequestTimes]]:
        """Generate on two models in the engine's process concurrently; the second one is loaded on the first call.

        :raises UnsupportedError: the engine does not support it
        :raises EngineFailedError: the engine failed
        """
        result = self.ask("generate_on_two", prompts=_as_json(prompts), others=_as_json(others), max_tokens=max_tokens)
        return [_checked(times, len(batch), max_tokens) for times, batch in zip(result, (prompts, others), strict=True)]

    def another(self) -> EngineProcess:
        """Start another process of the same engine, with the same settings; the caller closes it."""
        log = self._log.with_stem(f"{self._log.stem}-another")
        return EngineProcess(
            self._engine, self.settings, log, timeout=self._timeout, source=self._source, apart=self._apart
        )

    def event_loop_lag(self, prompts: Sequence[Prompt], max_tokens: int, interval: float) -> list[float]:
        """See :meth:`BenchmarkEngine.event_loop_lag`."""
        lags: list[float] = self.ask(
            "event_loop_lag", prompts=_as_json(prompts), max_tokens=max_tokens, interval=interval
        )
        return lags

    def idle_cpu(self, prompts: Sequence[Prompt], max_tokens: int, *, after: float, seconds: float) -> float:
        """Return how many CPUs the idle engine uses for ``seconds``, beginning ``after`` seconds after the last token
        of these prompts.
        """
        return float(
            self.ask("idle_cpu", prompts=_as_json(prompts), max_tokens=max_tokens, after=after, seconds=seconds)
        )

    def peak_memory(self) -> int:
        """Return the peak resident set of the engine's process, in bytes."""
        return int(self.ask("peak_memory"))

    def ask(self, do: str, **arguments: Any) -> Any:
        """Wake the engine, let it execute a command, and stop it again.

        :raises UnsupportedError: the engine does not support it
        :raises EngineFailedError: the engine failed
        """
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            return self._read(self._timeout)
        except BrokenPipeError as error:
            raise EngineFailedError(self._last_words()) from error
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the engine's processes. Idempotent."""
        self._end()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _read(self, timeout: float) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        if not ready:
            # A late answer would be taken for the answer to the next command.
            self._end()
            raise EngineFailedError(f"no answer within {timeout:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailedError(self._last_words())
        reply = json.loads(line)
        if "unsupported" in reply:
            raise UnsupportedError(reply["unsupported"])
        if "failed" in reply:
            raise EngineFailedError(reply["failed"])
        return reply["result"]

    def _last_words(self) -> str:
        # The pipe closes before the traceback is written: wait for the process.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING)
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return "the process ended: " + " | ".join(lines[-_LOG_LINES:])

    def _end(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            os.killpg(self._process.pid, number)


def _as_json(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    return [asdict(prompt) for prompt in prompts]


def _checked(result: Sequence[dict[str, Any]], num_requests: int, max_tokens: int) -> list[RequestTimes]:
    times = [RequestTimes(**entry) for entry in result]
    numbers = [entry.num_tokens for entry in times]
    if numbers != [max_tokens] * num_requests:
        raise EngineFailedError(f"asked for {max_tokens} tokens for each of {num_requests} prompts, got {numbers}")
    return times

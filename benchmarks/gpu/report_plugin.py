"""Let pytest write each test's result as soon as it has ended, and run only some of the tests: `-p
benchmarks.gpu.report_plugin --ends-to FILE --one-in 8`.

Reports that pytest writes at its end, such as JUnit XML, are lost if it is killed.
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


@pytest.hookimpl(trylast=True)  # after other options have deselected tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    one_in: int = config.getoption("--one-in")
    left_out = [item for place, item in enumerate(items) if place % one_in]
    if left_out:
        items[:] = items[::one_in]
        config.hook.pytest_deselected(items=left_out)


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--ends-to")
    # With pytest-xdist, workers report to the controller, which alone writes.
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(path))


class _Writer:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._held: dict[str, pytest.TestReport] = {}  # reports of tests whose teardown has not ended
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write each test once: as soon as it fails, otherwise after its teardown, which may fail too."""
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
    """Return why a test was skipped, or its exception, or an empty string."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return report.longreprtext[-_MESSAGE_LENGTH:] if crash is None else str(crash.message)[:_MESSAGE_LENGTH]

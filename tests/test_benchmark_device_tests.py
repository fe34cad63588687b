"""Tests on a device say how they end as they do, without plugins of pytest and with pytest-xdist."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest
from benchmarks.gpu import device_tests
from benchmarks.gpu.device_tests import Session, chosen_files, run_sessions, sessions_of, what_is_missing
from benchmarks.gpu.timing import Row

ENDS: Final = """
import os, pytest
def test_passing(): assert os.environ.get("CHECKED", "yes") == "yes"
def test_failing(): raise ValueError("what is wrong")
def test_skipped(): pytest.skip("no such thing here")
def test_of_a_model(): raise ValueError("The embedded model is not installed: pip install --no-deps llm-one")
@pytest.mark.long
def test_long(): raise AssertionError
"""
#: It comes after the others.
HANGS: Final = """
import pathlib, time
def test_that_hangs():
    pathlib.Path("begun").touch()
    time.sleep(600)
"""
#: What fails in a teardown counts once, however the test itself has ended.
TEARDOWNS: Final = """
import pytest
@pytest.fixture
def broken():
    yield
    raise ValueError("what a teardown lacks")
def test_passing(broken): pass
def test_failing(broken): raise ValueError("what is wrong")
def test_skipped(broken): pytest.skip("no such thing here")
def test_well(): pass
"""
RUNNER: Final = "import subprocess, sys; subprocess.run(sys.argv[1:], check=False)"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of the tests to run, without plugins, whose import takes longer than the tests."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(device_tests, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    return tmp_path / "tests"


def cases(rows: list[Row]) -> list[str]:
    return [row["case"] for row in rows]


@pytest.mark.parametrize("with_xdist", [False, True])
def test_how_tests_end(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, with_xdist: bool) -> None:
    if with_xdist:
        pytest.importorskip("xdist", reason="on a device tests run without plugins too")
        monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find_spec(name) if with_xdist else None)
    monkeypatch.setattr(device_tests, "usable_processors", lambda: 2)
    (files / "test_ends.py").write_text(ENDS)
    (files / "test_absent.py").write_text("import no_such_package\ndef test_one(): pass\n")
    sessions = sessions_of(sorted(files.iterdir()))
    assert len(sessions) == (1 if with_xdist else 2)
    rows = list(run_sessions(sessions, tmp_path, seconds=240))
    assert "left out: there is no package no_such_package" in cases(rows)
    assert "1 passed, 1 failed, 2 skipped" in cases(rows)
    assert "1 skipped: no such thing here" in cases(rows)
    assert "1 skipped: there is no package llm-one" in cases(rows)
    assert not [case for case in cases(rows) if case.startswith("ended")]
    (failed,) = [row for row in rows if row["case"] == "test_failing failed"]
    assert failed["kernel"] == "tests, test_ends.py"
    assert "what is wrong" in failed["error"]


def test_tests_that_are_ended_have_found_what_they_had(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, waiting, begun = files / "test_hanging.py", files / "test_waiting.py", tmp_path / "begun"
    path.write_text(ENDS + HANGS)
    waiting.write_text(ENDS)
    # The time is over as soon as the last test has begun, however slow the machine is.
    clock = SimpleNamespace(monotonic=lambda: 60.0 if begun.exists() else 0.0, sleep=time.sleep)
    monkeypatch.setattr(device_tests, "time", clock)
    rows = list(run_sessions([Session(files=[each]) for each in (path, waiting)], tmp_path, seconds=60, at_once=1))
    assert cases(rows)[:2] == ["test_failing failed", "1 passed, 1 failed, 2 skipped"]
    assert cases(rows)[-2:] == ["ended after 60 s", "no time was left"]


def test_one_in_some_tests(files: Path, tmp_path: Path) -> None:
    path = files / "test_many.py"
    path.write_text("".join(f"def test_{number}(): assert {number} % 3 == 0\n" for number in range(8)))
    (counts,) = run_sessions([Session(files=[path], options=["--one-in", "3"])], tmp_path, seconds=240)
    assert counts["case"] == "3 passed, 0 failed, 0 skipped"


def test_teardowns_that_fail(files: Path, tmp_path: Path) -> None:
    path = files / "test_teardowns.py"
    path.write_text(TEARDOWNS)
    *failed, counts = run_sessions([Session(files=[path])], tmp_path, seconds=240)
    assert counts["case"] == "1 passed, 3 failed, 0 skipped"
    assert cases(failed) == ["test_passing failed", "test_failing failed", "test_skipped failed"]
    wrong = ["what a teardown lacks", "what is wrong", "what a teardown lacks"]
    assert [text in row["error"] for text, row in zip(wrong, failed, strict=True)] == [True] * 3


def test_what_an_earlier_run_has_left_is_not_read(files: Path, tmp_path: Path) -> None:
    for name in ("test_first.py", "test_second.py"):
        (files / name).write_text("def test_one(): pass\n")
        (row,) = run_sessions([Session(files=[files / name])], tmp_path, seconds=240)
        assert (row["kernel"], row["case"]) == (f"tests, {name}", "1 passed, 0 failed, 0 skipped")


def test_tests_below_another_command(files: Path, tmp_path: Path) -> None:
    path = files / "test_ends.py"
    path.write_text("import os\ndef test_one(): assert os.environ['CHECKED'] == 'yes'\n")
    before = (sys.executable, "-c", RUNNER + "; sys.exit(86)")
    session = Session(files=[path], before=before, environment={"CHECKED": "yes"})
    passed, ended = run_sessions([session], tmp_path, seconds=240)
    assert passed["case"] == "1 passed, 0 failed, 0 skipped"
    assert ended["case"] == "ended with 86"


def test_what_no_test_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not what_is_missing()
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    assert cases(what_is_missing()) == ["left out: there is no package gguf"]


def test_files_that_differ_on_a_device_are_chosen() -> None:
    names = {path.name for path in chosen_files()}
    assert {"test_triton_paged.py", "test_submit_waits.py"} <= names
    assert len(names) > 20
    assert {path.name for path in chosen_files("kernels/test_triton_*.py")} < names

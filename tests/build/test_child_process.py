"""Processes that are started beside the application's."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from paged_sdk.build.child_process import start_program

PROGRAM = """
import sys

def main(text):
    print(text, flush=True)
    sys.stdin.read()
    print("whole", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_is_sent_to_all_processes_of_a_program_ends_none_at_any_time(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    pipe = subprocess.PIPE
    with start_program("a_program", "begun", what="a test", stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
        os.kill(process.pid, number)  # while the interpreter starts
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        os.kill(process.pid, number)
        out, err = process.communicate(b"", timeout=60)
    assert (out, err, process.returncode) == (b"whole\n", b"", 0)


def test_signals_are_let_through_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what the process starts could not be told to end."""
    main = "import signal\n\ndef main():\n    print(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())), flush=True)\n"
    (tmp_path / "another_program.py").write_text(main)
    monkeypatch.syspath_prepend(tmp_path)
    with start_program("another_program", what="a test", stdout=subprocess.PIPE) as process:
        out, _ = process.communicate(timeout=60)
    assert out == b"0\n"

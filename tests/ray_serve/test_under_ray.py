"""Replicas under Ray Serve itself: ``make test-long``."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'paged-sdk[ray]'"),
    pytest.mark.skipif(sys.platform != "linux", reason="finds the replicas' processes in /proc"),
]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("death", "after the last replica was killed"),
        ("hang", "by its replacement"),
        ("stopped", "in place of one that was stopped"),
        ("service", "scaled up and down"),
    ],
)
def test_it_holds_what_it_says(case: str, said: str) -> None:
    program = Path(__file__).with_name("under_ray.py")
    done = subprocess.run(
        [sys.executable, program, case], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert said in done.stdout

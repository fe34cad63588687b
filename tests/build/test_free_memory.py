"""What the process has freed goes back to the system."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from paged_sdk.build.free_memory import return_free_memory

MIB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc"
)
def test_pages_of_freed_memory_below_what_stays_are_given_back() -> None:
    objects = [b"x" * 2000 + bytes(2) for _ in range(32 * MIB // 2000)]
    stays = b"y" * 2000 + bytes(2)  # keeps the heap's end where it is
    del objects
    before = resident()
    return_free_memory()
    assert resident() < before - 24 * MIB
    assert stays.startswith(b"y")


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail(f"{name} was opened"))
    return_free_memory()

"""Scratch memory of the native kernels under AddressSanitizer: parts that lie side by side have gaps between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paged_sdk.kernels.native.sources import SOURCES

OVERRUN = Path(__file__).parents[1] / "native" / "arena_overrun.cpp"

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux", reason="the sanitizer is gcc's, on Linux"
)


def outcome(program: Path, offset: int) -> tuple[int, str]:
    # LD_PRELOAD: `make sanitize` has the runtime loaded before everything.
    ran = subprocess.run(
        [program, str(offset)], env=os.environ | {"LD_PRELOAD": ""}, capture_output=True, text=True, check=False
    )
    return ran.returncode, ran.stdout + ran.stderr


def built(directory: Path, *flags: str) -> Path:
    program = directory / "arena_overrun"
    subprocess.run(["g++", "-std=c++20", "-O1", *flags, f"-I{SOURCES}", str(OVERRUN), "-o", str(program)], check=True)
    return program


def test_an_overrun_of_a_part_is_found(tmp_path: Path) -> None:
    program = built(tmp_path, "-fsanitize=address")
    assert outcome(program, -1) == (0, f"{2 * (128 + 64)} bytes\n")
    for offset in (0, 63):
        code, said = outcome(program, offset)
        assert code != 0
        assert "use-after-poison" in said


def test_without_the_sanitizer_parts_lie_side_by_side(tmp_path: Path) -> None:
    program = built(tmp_path, "-DNDEBUG")
    assert outcome(program, 63) == (0, f"{2 * 128} bytes\n")

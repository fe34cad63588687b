"""Compare the native kernels' instruction-set levels with each other: `native/levels.cpp` says what has to be equal.

Those of ARM are built by a cross compiler and run in an emulator, which gives no time of theirs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from native_weights import needs_library
from paged_sdk.kernels.native import library
from paged_sdk.kernels.native.library import available_levels
from paged_sdk.kernels.native.sources import SOURCES

ROOT: Final = Path(__file__).parents[2]
DRIVER: Final = ROOT / "tests" / "native" / "levels.cpp"
CROSS: Final = "aarch64-linux-gnu-"
SYSROOT: Final = Path("/usr/aarch64-linux-gnu")

#: A processor that the emulator knows -> the levels that have to run on it.
PROCESSORS: Final = {
    "max": ["neon_i8mm", "neon_dotprod", "portable"],
    "cortex-a76": ["neon_dotprod", "portable"],
    "cortex-a72": ["portable"],
}


def build_driver(compiler: str, built: Path, to: Path) -> Path:
    """Compile the comparison against a library."""
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Werror"]
    command = [compiler, *flags, f"-I{SOURCES}", str(DRIVER), "-o", str(to), str(built), f"-Wl,-rpath,{built.parent}"]
    subprocess.run(command, check=True)
    return to


def check_levels(command: Sequence[str], levels: list[str]) -> None:
    """Run the comparison, and check that it was of these levels."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    named, comparisons = done.stdout.splitlines()[-1].split(":")
    assert named.split() == levels
    assert comparisons.endswith(" 0 failures")
    assert int(comparisons.split()[0]) >= 200 * (len(levels) - 1)


@needs_library
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="an instrumented library needs its runtime in the driver too")
def test_levels_of_this_machine(tmp_path: Path) -> None:
    driver = build_driver("c++", library._PATH, tmp_path / "levels")
    check_levels([str(driver)], list(available_levels()))


@pytest.fixture(scope="module")
def aarch64_driver() -> Path:
    """Return the comparison with the library, which `setup.py` builds for ARM."""
    for name in (f"{CROSS}g++", "qemu-aarch64"):
        if shutil.which(name) is None:
            pytest.skip(f"needs {name}: on Debian, apt-get install g++-aarch64-linux-gnu qemu-user")
    build = ROOT / "build" / "aarch64"
    compilers = {"CC": f"{CROSS}gcc", "CXX": f"{CROSS}g++"}
    linkers = dict.fromkeys(("LDSHARED", "LDCXXSHARED"), f"{CROSS}g++ -shared")
    places = ["--build-lib", str(build), "--build-temp", str(build / "temp")]
    environment = os.environ | compilers | linkers | {"PAGED_TARGET": "aarch64-linux"}
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", *places], cwd=ROOT, env=environment, check=True)
    return build_driver(f"{CROSS}g++", build / library._PATH.relative_to(ROOT / "src"), build / "levels")


@pytest.mark.aarch64
@pytest.mark.timeout(1200)  # the build takes 80 s of processor time, the emulator 25 s
@pytest.mark.parametrize("processor", PROCESSORS)
def test_levels_of_arm(aarch64_driver: Path, processor: str) -> None:
    command = ["qemu-aarch64", "-L", str(SYSROOT), "-cpu", processor, str(aarch64_driver)]
    check_levels(command, PROCESSORS[processor])

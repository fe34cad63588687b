"""Every Triton kernel compiles for the GPUs that it is for, and takes no more of them than they have; without a GPU."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("triton")

from paged_sdk.kernels import triton as kernels

SHARED_MEMORY: Final = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}
"""KiB for one program, by compute capability (CUDA C++ Programming Guide, table of technical specifications)."""

LARGEST_SPILL: Final = 128
"""Registers may spill this many bytes per thread: so few are read again from the cache in no time."""


def compiled(capability: int, *options: str) -> list[dict[str, Any]]:
    """Return the resources that the kernels take, compiled in a process that does not interpret them."""
    script = Path(__file__).with_name("triton_compilation.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]  # benchmarks, and what was there
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [sys.executable, str(script), str(capability), *options],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def launched() -> set[str]:
    """Return the kernels that the package launches: whatever is called as ``kernel[grid](...)``."""
    (package,) = kernels.__path__
    return {
        f"{kernels.__name__}.{path.stem}.{call.func.value.id}"
        for path in Path(package).glob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript) and isinstance(call.func.value, ast.Name)
    }


def assert_fit(found: list[dict[str, Any]], capability: int) -> None:
    too_large = [each for each in found if each["shared"] > SHARED_MEMORY[capability] << 10]
    assert not too_large
    spilled = [each for each in found if each["stack"] > LARGEST_SPILL]
    assert not spilled
    # Triton makes this, and no error, of matrix instructions that it cannot lay out.
    assert not [each for each in found if each["traps"]]


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.long), 90])
def test_every_kernel_compiles(capability: int) -> None:
    found = compiled(capability, "--few")
    assert {each["kernel"] for each in found} == launched()
    assert_fit(found, capability)
    # It rotates in place: a warp that shares elements with another may not find them rotated.
    in_place = [each for each in found if each["kernel"].endswith("_rotate_and_cache_kernel")]
    assert in_place
    assert all(each["waits_before_storing"] for each in in_place)


def test_what_needs_most_compiles_for_older_gpus() -> None:
    """Tiles of matrices and of attention: they differ from those for newer ones, and take most of what there is."""
    found = compiled(80, "--tiles")
    assert {each["kernel"].rpartition(".")[2] for each in found} >= {"_attend_tile", "_tile_kernel"}
    assert_fit(found, 80)


@pytest.mark.gpu_compile
@pytest.mark.timeout(1800)  # with nothing in Triton's cache, 340 kernels take minutes
@pytest.mark.parametrize("capability", sorted(SHARED_MEMORY))
def test_every_variant_compiles(capability: int) -> None:
    assert_fit(compiled(capability), capability)

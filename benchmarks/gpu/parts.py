"""The parts of a run on a GPU: `python -m benchmarks.gpu.parts NAME ROWS [--dry-run]` does one and writes its rows.

A part has a process of its own: it gives all memory back, and neither a crash nor a hang loses what others found.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final
from xml.etree import ElementTree

import torch
from attrs import frozen

from benchmarks.gpu.timing import Row

__all__ = ["PARTS", "Part"]

ROOT: Final = Path(__file__).resolve().parents[2]
#: A test file with one of these is worth running on a GPU.
_TESTED_ON_GPUS: Final = ("triton_device", "cuda.is_available")


@frozen(kw_only=True)
class Part:
    """One of the things to find out.

    :ivar seconds: it may take
    :ivar rows: what it finds, as it finds it; called with the device, and whether tiny shapes are to do
    :ivar needs_gpu: there is no dry run
    """

    seconds: int
    rows: Callable[[torch.device, bool], Iterator[Row]]
    needs_gpu: bool = False


def _limits(device: torch.device, dry: bool) -> Iterator[Row]:
    from benchmarks.gpu.timing import copy_bandwidth, matmul_tflops

    yield {"kernel": "limit", "case": "a copy of 1 GiB on the device", "gbps": copy_bandwidth(device)}
    yield {"kernel": "limit", "case": "torch, 8192 x 8192 x 8192 in bfloat16", "tflops": matmul_tflops(device)}


def _tests(device: torch.device, dry: bool) -> Iterator[Row]:
    """Every test that differs on a GPU; pytest's own plugins suffice."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    chosen = [str(path) for path in paths if any(mark in path.read_text() for mark in _TESTED_ON_GPUS)]
    with tempfile.TemporaryDirectory() as directory:
        settings, report = Path(directory, "pytest.ini"), Path(directory, "report.xml")
        settings.write_text("[pytest]\n")  # the project's asks for plugins that need not be there
        command = [sys.executable, "-m", "pytest", "-q", "-c", str(settings), "--rootdir", str(ROOT)]
        options = ["-p", "no:cacheprovider", "--import-mode=prepend", f"--junitxml={report}"]
        subprocess.run([*command, *options, *chosen], cwd=ROOT, check=False)
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    case = f"{passed} passed, {failed} failed, {counts['skipped']} skipped"
    yield {"kernel": "tests", "case": case, "us": float(suite.get("time", 0)) * 1e6}
    for test in suite.iter("testcase"):
        for problem in (*test.findall("failure"), *test.findall("error")):
            name = f"{test.get('classname')}::{test.get('name')}"
            yield {"kernel": "tests", "case": name, "error": problem.get("message", "")[:500]}


def _kernel(name: str, device: torch.device, dry: bool) -> Iterator[Row]:
    rows: Iterator[Row] = importlib.import_module(f"benchmarks.gpu.{name}").run(device)
    return rows


def _own(shape: str, device: torch.device, dry: bool, *, quantised: bool = False) -> Iterator[Row]:
    from benchmarks.gpu.whole_engine import run_own

    return run_own(shape, device, quantised=quantised, dry=dry)


def _transformers(shape: str, device: torch.device, dry: bool) -> Iterator[Row]:
    from benchmarks.gpu.whole_engine import run_transformers

    return run_transformers(shape, device, dry=dry)


#: The most wanted first: what is last may find no time left.
PARTS: Final[Mapping[str, Part]] = MappingProxyType(
    {
        "limits": Part(seconds=30, rows=_limits, needs_gpu=True),
        "tests": Part(seconds=120, rows=_tests, needs_gpu=True),
        "llama": Part(seconds=75, rows=partial(_own, "llama")),
        "paged_attention": Part(seconds=45, rows=partial(_kernel, "paged_attention"), needs_gpu=True),
        "llama_q4_k": Part(seconds=60, rows=partial(_own, "llama", quantised=True)),
        "qwen3_moe": Part(seconds=75, rows=partial(_own, "qwen3_moe")),
        "quantised_linear": Part(seconds=60, rows=partial(_kernel, "quantised_linear"), needs_gpu=True),
        "fused_moe": Part(seconds=30, rows=partial(_kernel, "fused_moe"), needs_gpu=True),
        "small_ops": Part(seconds=30, rows=partial(_kernel, "small_ops"), needs_gpu=True),
        "transformers_llama": Part(seconds=75, rows=partial(_transformers, "llama")),
        "transformers_qwen3_moe": Part(seconds=75, rows=partial(_transformers, "qwen3_moe")),
    }
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    with arguments.rows.open("w") as file:
        for row in PARTS[arguments.name].rows(device, arguments.dry_run):
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()

"""Run one part of a run on a GPU: `python -m benchmarks.gpu.parts NAME ROWS [--dry-run]` writes its rows.

A part has a process of its own: all its memory is freed, and neither a crash nor a hang loses what others found.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
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
_TESTS_AT_ONCE: Final = 8


@frozen(kw_only=True)
class Part:
    """Describes one of the things to find out.

    :ivar seconds: the time that it may take
    :ivar rows: yields rows as it finds them; called with the device, and whether to use tiny shapes
    :ivar needs_gpu: whether it needs a GPU, so that it has no dry run
    """

    seconds: int
    rows: Callable[[torch.device, bool], Iterator[Row]]
    needs_gpu: bool = False


def _limits(device: torch.device, dry: bool) -> Iterator[Row]:
    from benchmarks.gpu.timing import copy_bandwidth, matmul_tflops

    yield {"kernel": "limit", "case": "a copy of 1 GiB on the device", "gbps": copy_bandwidth(device)}
    yield {"kernel": "limit", "case": "torch, 8192 x 8192 x 8192 in bfloat16", "tflops": matmul_tflops(device)}


def _tests(device: torch.device, dry: bool) -> Iterator[Row]:
    """Run every test that differs on a GPU, files side by side: most of their time goes into compiling kernels."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    chosen = [path for path in paths if any(mark in path.read_text() for mark in _TESTED_ON_GPUS)]
    with ThreadPoolExecutor(_TESTS_AT_ONCE) as pool:
        for done in as_completed([pool.submit(_test, path) for path in chosen]):
            yield from done.result()


def _test(path: Path, *before: str, **environment: str) -> list[Row]:
    """Run one file, with pytest's own plugins; its long forms are for other times.

    :param before: a command that runs another
    """
    kernel = f"tests, {path.relative_to(ROOT / 'tests')}"
    with tempfile.TemporaryDirectory() as directory:
        settings, report = Path(directory, "pytest.ini"), Path(directory, "report.xml")
        settings.write_text("[pytest]\n")  # the project's asks for plugins that need not be there
        command = [*before, sys.executable, "-m", "pytest", "-q", "-c", str(settings), "--rootdir", str(ROOT)]
        options = ["-p", "no:cacheprovider", "-m", "not long and not timing", f"--junitxml={report}", str(path)]
        ended = subprocess.run(
            [*command, *options], cwd=ROOT, check=False, capture_output=True, text=True, env=os.environ | environment
        )
        if not report.exists():
            return [{"kernel": kernel, "case": "did not run", "error": (ended.stderr or ended.stdout)[-1000:]}]
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = {
        case: problem for case in cases for kind in ("failure", "error") if (problem := case.find(kind)) is not None
    }
    skipped = sum(case.find("skipped") is not None for case in cases)
    summary = f"{len(cases) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped"
    found: list[Row] = [
        {"kernel": kernel, "case": summary, "us": sum(float(case.get("time", 0)) for case in cases) * 1e6},
        *(
            {"kernel": kernel, "case": f"{case.get('name')} failed", "error": problem.get("message", "")[:500]}
            for case, problem in failed.items()
        ),
    ]
    if ended.returncode and not failed:
        found.append({"kernel": kernel, "case": f"ended with {ended.returncode}", "error": ended.stdout[-1000:]})
    return found


def _memcheck(device: torch.device, dry: bool) -> Iterator[Row]:
    """Run the kernels' tests under compute-sanitizer, one file after the other: no access is outside of a tensor."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        yield {"kernel": "memcheck", "case": "compute-sanitizer is not installed: nothing was checked"}
        return
    before = [tool, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "86"]
    for path in sorted((ROOT / "tests" / "kernels").glob("test_triton_*.py")):
        if any(mark in path.read_text() for mark in _TESTED_ON_GPUS):
            # Without torch's cache each tensor is an allocation of its own, past whose end nothing is valid.
            yield from _test(path, *before, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def _kernel(name: str, device: torch.device, dry: bool) -> Iterator[Row]:
    rows: Iterator[Row] = importlib.import_module(f"benchmarks.gpu.{name}").run(device)
    return rows


def _own(shape: str, device: torch.device, dry: bool, *, quantized: bool = False) -> Iterator[Row]:
    from benchmarks.gpu.whole_engine import run_own

    return run_own(shape, device, quantized=quantized, dry=dry)


def _transformers(shape: str, device: torch.device, dry: bool) -> Iterator[Row]:
    from benchmarks.gpu.whole_engine import run_transformers

    return run_transformers(shape, device, dry=dry)


def _mixed(shape: str, device: torch.device, dry: bool) -> Iterator[Row]:
    from benchmarks.gpu.mixed_steps import run

    return run(shape, device, dry=dry)


#: The most wanted first: what is last may find no time left.
PARTS: Final[Mapping[str, Part]] = MappingProxyType(
    {
        "limits": Part(seconds=30, rows=_limits, needs_gpu=True),
        "tests": Part(seconds=100, rows=_tests, needs_gpu=True),
        "llama": Part(seconds=75, rows=partial(_own, "llama")),
        "mixed_steps": Part(seconds=60, rows=partial(_mixed, "llama")),
        "paged_attention": Part(seconds=45, rows=partial(_kernel, "paged_attention"), needs_gpu=True),
        "llama_q4_k": Part(seconds=60, rows=partial(_own, "llama", quantized=True)),
        "qwen3_moe": Part(seconds=75, rows=partial(_own, "qwen3_moe")),
        "quantized_linear": Part(seconds=60, rows=partial(_kernel, "quantized_linear"), needs_gpu=True),
        "fused_moe": Part(seconds=45, rows=partial(_kernel, "fused_moe"), needs_gpu=True),
        "small_ops": Part(seconds=30, rows=partial(_kernel, "small_ops"), needs_gpu=True),
        "transformers_llama": Part(seconds=60, rows=partial(_transformers, "llama")),
        "transformers_qwen3_moe": Part(seconds=60, rows=partial(_transformers, "qwen3_moe")),
        "memcheck": Part(seconds=540, rows=_memcheck, needs_gpu=True),
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

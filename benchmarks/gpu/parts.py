"""Run one part of a run on a GPU: `python -m benchmarks.gpu.parts NAME ROWS [--dry-run] [--seconds N]` writes its rows.

Each part has a separate process, so that all its memory is freed, and a crash or hang loses no results of other parts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from attrs import frozen

from benchmarks.gpu.device_tests import Session, chosen_files, run_sessions, sessions_of, what_is_missing
from benchmarks.gpu.timing import Row

__all__ = ["PARTS", "Part", "Run"]

# Run only one in 8: a kernel's tests differ only in sizes and dtypes, and each takes many times as long under
# compute-sanitizer and without torch's allocation cache.
_CHECKED_ONE_IN: Final = 8


@frozen(kw_only=True)
class Run:
    """Holds the settings of a part's run.

    :ivar directory: directory for output other than rows
    :ivar dry: whether to use tiny shapes
    :ivar seconds: time limit, for parts that can end early
    """

    device: torch.device
    directory: Path
    dry: bool = False
    seconds: float = math.inf


@frozen(kw_only=True)
class Part:
    """Describes one part.

    :ivar seconds: time limit
    :ivar rows: yields rows as they are found
    :ivar needs_gpu: whether the part needs a GPU, and so has no dry run
    """

    seconds: int
    rows: Callable[[Run], Iterator[Row]]
    needs_gpu: bool = False


def _limits(run: Run) -> Iterator[Row]:
    from benchmarks.gpu.timing import copy_bandwidth, matmul_tflops

    yield {"kernel": "limit", "case": "a copy of 1 GiB on the device", "gbps": copy_bandwidth(run.device)}
    yield {"kernel": "limit", "case": "torch, 8192 x 8192 x 8192 in bfloat16", "tflops": matmul_tflops(run.device)}


def _tests(run: Run) -> Iterator[Row]:
    if missing := what_is_missing():
        yield from missing
        return
    yield from run_sessions(sessions_of(chosen_files()), run.directory, seconds=run.seconds)


def _memcheck(run: Run) -> Iterator[Row]:
    """Run some of the kernels' tests under compute-sanitizer, which detects accesses outside of tensors."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        yield {"kernel": "memcheck", "case": "compute-sanitizer is not installed: nothing was checked"}
        return
    before = [tool, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "86"]
    # Without torch's cache, each tensor is a separate allocation, so that accesses past its end are detected.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    files = chosen_files("kernels/test_triton_*.py")
    options = ["--one-in", str(_CHECKED_ONE_IN)]
    sessions = [Session(files=[path], options=options, before=before, environment=environment) for path in files]
    yield {"kernel": "memcheck", "case": f"one in {_CHECKED_ONE_IN} tests of each of {len(files)} files"}
    yield from run_sessions(sessions, run.directory, seconds=run.seconds)


def _kernel(name: str, run: Run) -> Iterator[Row]:
    rows: Iterator[Row] = importlib.import_module(f"benchmarks.gpu.{name}").run(run.device)
    return rows


def _sweep(run: Run) -> Iterator[Row]:
    from benchmarks.gpu.quantized_linear import sweep

    return sweep(run.device)


def _own(shape: str, run: Run, *, quantized: bool = False) -> Iterator[Row]:
    from benchmarks.gpu.whole_engine import run_own

    return run_own(shape, run.device, quantized=quantized, dry=run.dry)


def _transformers(shape: str, run: Run) -> Iterator[Row]:
    from benchmarks.gpu.whole_engine import run_transformers

    return run_transformers(shape, run.device, dry=run.dry)


def _mixed(shape: str, run: Run) -> Iterator[Row]:
    from benchmarks.gpu import mixed_steps

    return mixed_steps.run(shape, run.device, dry=run.dry)


#: The most wanted first: what is last may find no time left.
PARTS: Final[Mapping[str, Part]] = MappingProxyType(
    {
        "limits": Part(seconds=25, rows=_limits, needs_gpu=True),
        "tests": Part(seconds=230, rows=_tests, needs_gpu=True),
        "llama": Part(seconds=110, rows=partial(_own, "llama")),
        "mixed_steps": Part(seconds=70, rows=partial(_mixed, "llama")),
        "paged_attention": Part(seconds=50, rows=partial(_kernel, "paged_attention"), needs_gpu=True),
        "large_heads": Part(seconds=40, rows=partial(_kernel, "large_heads"), needs_gpu=True),
        "llama_q4_k": Part(seconds=60, rows=partial(_own, "llama", quantized=True)),
        "qwen3_moe": Part(seconds=75, rows=partial(_own, "qwen3_moe")),
        "quantized_linear": Part(seconds=70, rows=partial(_kernel, "quantized_linear"), needs_gpu=True),
        "fused_moe": Part(seconds=50, rows=partial(_kernel, "fused_moe"), needs_gpu=True),
        "small_ops": Part(seconds=40, rows=partial(_kernel, "small_ops"), needs_gpu=True),
        "transformers_llama": Part(seconds=60, rows=partial(_transformers, "llama")),
        "transformers_qwen3_moe": Part(seconds=60, rows=partial(_transformers, "qwen3_moe")),
        "sweep": Part(seconds=540, rows=_sweep, needs_gpu=True),
        "memcheck": Part(seconds=240, rows=_memcheck, needs_gpu=True),
    }
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf)
    arguments = parser.parse_args()
    run = Run(
        device=torch.device("cpu" if arguments.dry_run else "cuda"),
        directory=arguments.rows.parent,
        dry=arguments.dry_run,
        seconds=arguments.seconds,
    )
    with arguments.rows.open("w") as file:
        for row in PARTS[arguments.name].rows(run):
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()

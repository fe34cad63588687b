"""Measure loading of checkpoints: from files in the page cache to weights packed for the CPU.

python -m benchmarks.load_formats DIRECTORY... --rounds 6 [--isq Q4K]

Checkpoints take turns. The fastest round of each is shown, in wall time and CPU time; on a shared machine, CPU time is
more meaningful. With ``--isq`` each is quantized first, and then loaded from the quantization cache.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from attrs import frozen
from rich.console import Console
from rich.table import Table

from paged_sdk.config.isq import IsqType
from paged_sdk.kernels.native.library import Workspace, load
from paged_sdk.kernels.own_pages import LastingMemory
from paged_sdk.kernels.placement import Placement
from paged_sdk.models.any_model import plan_model
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.runner.device import choose_dtype
from paged_sdk.system.processors import usable_processors
from paged_sdk.weights.checkpoint import open_checkpoint
from paged_sdk.weights.quantized_cache import QuantizedCache

__all__ = ["main"]

_CPU = torch.device("cpu")


@frozen
class _Times:
    """Holds the milliseconds of loading once.

    :ivar wall: wall time
    :ivar processors: CPU time of all threads
    """

    wall: float
    processors: float

    def least(self, other: _Times) -> _Times:
        return _Times(min(self.wall, other.wall), min(self.processors, other.processors))


def _load(path: Path, workspace: Workspace, isq: IsqType | None, cached: Path | None) -> _Times:
    """Load a checkpoint.

    :param cached: the cache file of quantized weights
    """
    dtype = choose_dtype("auto", _CPU)
    wall, processors = time.perf_counter(), time.process_time()
    checkpoint = open_checkpoint(path)
    cache = None if cached is None else QuantizedCache(cached, path.name)
    policy = WeightPolicy(
        keep_blocks=True,
        workspace=workspace,
        memory=LastingMemory(),
        isq=isq,
        cached=None if cache is None else cache.cached,
    )
    plan = plan_model(checkpoint.config, dtype)
    model = plan.load(
        checkpoint.source,
        dtype=dtype,
        placement=Placement.on(_CPU, plan.config.num_layers),
        policy=policy,
        on_progress=None,
        num_threads=workspace.num_threads,
    )
    checkpoint.source.close()
    if cache is not None:
        cache.close(is_complete=True)
    found = _Times((time.perf_counter() - wall) * 1000, (time.process_time() - processors) * 1000)
    del model
    gc.collect()
    return found


def _read(path: Path) -> None:
    """Read a checkpoint into the page cache."""
    for file in [path] if path.is_file() else path.glob("*.safetensors"):
        file.read_bytes()


def main(
    checkpoints: Annotated[list[Path], typer.Argument(help="Directories or GGUF files")],
    rounds: Annotated[int, typer.Option(min=1, help="How often each is loaded")] = 6,
    isq: Annotated[str, typer.Option(help="A type to quantize to")] = "",
) -> None:
    """Load checkpoints in turns and print the fastest of each."""
    library = load()
    if library is None:
        raise typer.BadParameter("the native library is missing")
    workspace = Workspace(library, num_threads=usable_processors())
    best: dict[str, _Times] = {}
    quantized = IsqType.parse(isq) if isq else None
    with TemporaryDirectory() as directory:
        cached = {path: Path(directory, f"{number}") for number, path in enumerate(checkpoints)}
        for path in checkpoints if isq else ():
            _load(path, workspace, quantized, cached[path])
        for _ in range(rounds):
            for path in checkpoints:
                _read(path)
                ways = {path.name: None, f"{path.name}, cached": cached[path]} if isq else {path.name: None}
                for way, file in ways.items():
                    found = _load(path, workspace, quantized, file)
                    best[way] = found.least(best.get(way, found))
    table = Table(title=f"files to packed weights, {workspace.num_threads} threads, fastest of {rounds}")
    for column in ("", "ms", "processor ms"):
        table.add_column(column, justify="left" if column == "" else "right")
    for way, times in best.items():
        table.add_row(way, f"{times.wall:.0f}", f"{times.processors:.0f}")
    Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    typer.run(main)

"""Measure the time from a process's start to its first token, and for comparison that of importing torch.

python -m benchmarks.start --model smollm2 --against REVISION

Processes take turns, and one runs at a time; the file is in the page cache.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from statistics import median
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.environments import OWN
from benchmarks.models import benchmark_model
from benchmarks.paths import cache_directory
from benchmarks.process import EngineProcess
from benchmarks.prompts import PromptMaker, tokenizer_of
from benchmarks.protocol import EngineSettings
from benchmarks.tasks import LOAD, Sizes, load_figures
from benchmarks.versions import Version, VersionError, other_version, working_tree
from paged_sdk.system.processors import usable_processors

__all__ = ["import_seconds", "main"]

_TORCH: Final = "import of torch alone"


def import_seconds(module: str) -> float:
    """Return the seconds that a process takes to start, import a module, and end."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - begun


def _first_token(
    version: Version, settings: EngineSettings, prompts: PromptMaker, sizes: Sizes, key: str
) -> tuple[float, float]:
    """Return the seconds to the first token, and the peak resident set until then in MiB."""
    log = cache_directory("logs") / "start.log"
    with closing(EngineProcess(OWN, settings, log, timeout=60, source=version.source)) as engine:
        seconds = load_figures(engine, prompts, sizes, key)[LOAD.key]
        return seconds, engine.peak_memory() / 2**20


def main(
    model: Annotated[str, typer.Option(help="The model, as of `make bench`")] = "smollm2",
    rounds: Annotated[int, typer.Option(min=1, help="How often each is started")] = 5,
    against: Annotated[str, typer.Option(help="A commit to start in turns with the working tree")] = "",
) -> None:
    """Start processes in turns and print medians."""
    try:
        versions = [*([other_version(against)] if against else []), working_tree()]
    except VersionError as error:
        raise typer.BadParameter(str(error), param_hint="--against") from None
    chosen, sizes = benchmark_model(model), Sizes()
    prompts = PromptMaker(tokenizer_of(chosen.source))
    settings = EngineSettings(str(chosen.source), usable_processors(), sizes.max_model_len, max(sizes.streams))
    seconds: dict[str, list[float]] = {_TORCH: []}
    peaks: dict[str, list[float]] = {}
    chosen.source.read_bytes()  # into the page cache
    for number in range(rounds):
        seconds[_TORCH].append(import_seconds("torch"))
        for version in versions:
            first, peak = _first_token(version, settings, prompts, sizes, f"{number}")
            seconds.setdefault(version.name, []).append(first)
            peaks.setdefault(version.name, []).append(peak)
    table = Table(title=f"{chosen.name}, process start to first token, medians of {rounds}")
    for column in ("", "s", "beyond torch, s", "peak resident, MiB"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, values in seconds.items():
        beyond = median(each - torch for each, torch in zip(values, seconds[_TORCH], strict=True))
        cells = ("", "") if name == _TORCH else (f"{beyond:.2f}", f"{median(peaks[name]):.0f}")
        table.add_row(name, f"{median(values):.2f}", *cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    typer.run(main)

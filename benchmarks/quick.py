"""Run `make bench-quick`: measure the working tree beside another version of this project, and say what got slower.

python -m benchmarks.quick --against REVISION

Both versions are loaded, each in a process of its own, and take turns task by task; every few rounds both are started
afresh, since one process may be lucky with its memory. A task is called slower if the ratios of its rounds, taken
together, are very unlikely for equal speed. The exit status is then 1.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import typer
from attrs import evolve, frozen
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.environments import OWN
from benchmarks.machine import describe_machine, usable_cpus
from benchmarks.models import benchmark_model
from benchmarks.paths import cache_directory
from benchmarks.process import EngineProcess
from benchmarks.prompts import PromptMaker, tokenizer_of
from benchmarks.protocol import EngineSettings
from benchmarks.results import as_text
from benchmarks.tasks import LOAD, Metric, Sizes, Task, load_figures, make_tasks, warm_up
from benchmarks.versions import Version, VersionError, last_tag, other_version, working_tree

__all__ = ["Comparison", "interval", "main", "verdict"]

TASKS: Final = ("decode-1", "decode-4", "decode-16", "prefix", "memory")
ROUNDS_PER_START: Final = 4
LEAST: Final = 0.03
"""A change by less than this part is no finding, however sure it is: other layouts of the same code make as much."""

_DRAWS: Final = 2000
_console = Console(stderr=True, log_path=False, highlight=False)


@frozen
class Interval:
    """Holds what is known of a ratio.

    :ivar low: all but 1 % of the resampled medians are above it
    :ivar high: all but 1 % are below it
    """

    low: float
    middle: float
    high: float


def interval(ratios: Sequence[float], *, seed: int = 0) -> Interval:
    """Return the median of ratios, and between what bounds it lies, by the bootstrap (Efron 1979).

    :param ratios: one per round; at least one
    """
    rng = random.Random(seed)
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(_DRAWS))
    return Interval(medians[_DRAWS // 100], median(ratios), medians[-1 - _DRAWS // 100])


def verdict(found: Interval) -> str:
    """Return ``slower``, ``faster``, or an empty string where the two versions cannot be told apart."""
    if found.high < 1 and found.middle < 1 - LEAST:
        return "slower"
    if found.low > 1 and found.middle > 1 + LEAST:
        return "faster"
    return ""


class Comparison:
    """Measures two versions in turns.

    :param versions: the other one, and the working tree
    :ivar values: one figure per round, by version and metric; of the load time one per start
    """

    def __init__(
        self, versions: tuple[Version, Version], *, settings: EngineSettings, sizes: Sizes, prompts: PromptMaker
    ) -> None:
        self.values: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
        self.tasks: list[Task] = [task for task in make_tasks(sizes) if task.name in TASKS]
        self._versions = versions
        self._settings = settings
        self._sizes = sizes
        self._prompts = prompts

    @property
    def metrics(self) -> list[Metric]:
        """Return what was measured, in order."""
        return [LOAD, *(metric for task in self.tasks for metric in task.metrics)]

    def start(self, number: int) -> None:
        """Start both versions and measure some rounds with them."""
        with ExitStack() as stack:
            engines: dict[int, EngineProcess] = {}
            for which in self._order(number):
                log = cache_directory("logs") / f"version-{which}.log"
                engine = EngineProcess(OWN, self._settings, log, timeout=60, source=self._versions[which].source)
                stack.callback(engine.close)
                self._add(which, load_figures(engine, self._prompts, self._sizes, f"{number}"))
                warm_up(engine, self._prompts, self._sizes, f"{number}, warm-up")
                engines[which] = engine
            for turn in range(ROUNDS_PER_START):
                for task in self.tasks:
                    for which in self._order(number + turn):
                        self._add(which, task.measure(engines[which], self._prompts, f"{number}.{turn}.{task.name}"))

    def ratios(self, metric: Metric) -> list[float]:
        """Return by round how much better the working tree is; above 1 it is better, whichever way the metric goes."""
        pairs = zip(*(values[metric.key] for values in self.values), strict=True)
        return [after / before if metric.higher_is_better else before / after for before, after in pairs]

    def _order(self, number: int) -> tuple[int, int]:
        return (0, 1) if number % 2 else (1, 0)

    def _add(self, which: int, figures: Any) -> None:
        for key, value in figures.items():
            self.values[which].setdefault(key, []).append(value)


def _report(comparison: Comparison, versions: tuple[Version, Version]) -> list[str]:
    """Print the table, and return what got slower."""
    table = Table(title="medians; ratio above 1: the working tree is better")
    for column in ("", versions[0].name, versions[1].name, "ratio", "between", ""):
        table.add_column(column, justify="left" if column == "" else "right")
    slower = []
    for metric in comparison.metrics:
        found = interval(comparison.ratios(metric))
        said = verdict(found)
        if said == "slower":
            slower.append(metric.title)
        cells = [as_text(median(values[metric.key])) for values in comparison.values]
        bounds = f"{found.low:.3f} - {found.high:.3f}"
        color = {"slower": "red", "faster": "green"}.get(said, "default")
        table.add_row(f"{metric.title}, {metric.unit}", *cells, f"{found.middle:.3f}", bounds, f"[{color}]{said}[/]")
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return slower


def _save(comparison: Comparison, version: Version, machine: dict[str, Any], directory: Path) -> Path:
    """Add the working tree's medians to the file of this processor."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']} {machine['cpus']} cpus".lower()).strip("-")
    path = directory / f"{name}.json"
    history = json.loads(path.read_text()) if path.exists() else {"machine": machine, "versions": {}}
    history["versions"][version.name] = {
        metric.key: float(f"{median(comparison.values[1][metric.key]):.4g}") for metric in comparison.metrics
    }
    path.write_text(json.dumps(history, indent=2) + "\n")
    return path


def main(
    against: Annotated[str, typer.Option(help="The commit to compare with; default: the last tag")] = "",
    model: Annotated[str, typer.Option(help="The model, as of `make bench`")] = "smollm2",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds after which both are not started again")] = 100,
    save: Annotated[bool, typer.Option("--save", help="Keep the figures under benchmarks/results/")] = False,
) -> None:
    """Measure the working tree beside another version of this project."""
    try:
        _console.log("Building the version to compare with, if it is a new one")
        versions = (other_version(against or last_tag()), working_tree())
    except VersionError as error:
        raise typer.BadParameter(str(error), param_hint="--against") from None
    chosen, sizes = benchmark_model(model), evolve(Sizes(), output=96)
    settings = EngineSettings(str(chosen.source), usable_cpus(), sizes.max_model_len, max(sizes.streams))
    prompts = PromptMaker(tokenizer_of(chosen.source))
    machine = describe_machine()
    comparison = Comparison(versions, settings=settings, sizes=sizes, prompts=prompts)
    begun, number = time.monotonic(), 0
    with Progress(console=_console) as progress:
        shown = progress.add_task("measuring in turns", total=seconds)
        while time.monotonic() - begun < seconds or number < 2:
            comparison.start(number)
            number += 1
            progress.update(shown, completed=time.monotonic() - begun)
    slower = _report(comparison, versions)
    if save:
        directory = Path(__file__).parent / "results"
        directory.mkdir(exist_ok=True)
        _console.print(f"written to {_save(comparison, versions[1], machine, directory)}")
    if slower:
        _console.print(f"[red]slower than {versions[0].name}: {', '.join(slower)}[/]")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

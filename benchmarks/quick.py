"""Run `make bench-quick`: compare the working tree with another version of this project, and report what got slower.

python -m benchmarks.quick [--against REVISION] [--save]

Both versions are loaded in separate processes and take turns task by task. Every few rounds both are restarted, since a
process may be lucky with its memory layout. A task is called slower if the ratios of its rounds are very unlikely for
equal speed. The exit status is then 1.

Saved figures of an earlier version on this processor are shown too, for information only: a figure may change by a
quarter within 15 minutes, so only measurements in turns decide.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import date
from statistics import median
from typing import Annotated, Any, Final

import typer
from attrs import evolve, frozen
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.busy import Busy, beside
from benchmarks.environments import OWN
from benchmarks.machine import describe_machine
from benchmarks.models import benchmark_model
from benchmarks.paths import cache_directory
from benchmarks.process import EngineProcess
from benchmarks.prompts import PromptMaker, tokenizer_of
from benchmarks.protocol import EngineSettings
from benchmarks.results import as_text
from benchmarks.saved import Saved, file_of, last_saved
from benchmarks.saved import save as keep
from benchmarks.tasks import LOAD, Metric, Sizes, Task, load_figures, make_tasks, warm_up
from benchmarks.versions import Version, VersionError, last_tag, other_version, working_tree
from paged_sdk.system.processors import usable_processors

__all__ = ["Comparison", "interval", "main", "verdict"]

TASKS: Final = ("decode-1", "decode-4", "decode-16", "prefix", "peak")
BESIDE: Final = ("decode-1",)
"""Tasks that are also measured beside a busy process."""

ROUNDS_PER_START: Final = 2
LEAST: Final = 0.03
"""Relative changes below this are ignored, even if significant: another layout of the same code changes as much."""

FEWEST: Final = 6
"""Minimum number of ratios for a verdict: with five, the bounds are the extremes, and five ratios on one side of 1
occur by chance once in 16 times.
"""

_DRAWS: Final = 2000
_console = Console(stderr=True, log_path=False, highlight=False)


@frozen
class Interval:
    """Holds a median ratio with its confidence interval.

    :ivar low: 1st percentile of the resampled medians
    :ivar high: 99th percentile of the resampled medians
    :ivar num_ratios: number of ratios
    """

    low: float
    middle: float
    high: float
    num_ratios: int


def interval(ratios: Sequence[float], *, seed: int = 0) -> Interval:
    """Return the median of ratios with its confidence interval, by the bootstrap (Efron 1979).

    :param ratios: one per round; at least one
    """
    rng = random.Random(seed)
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(_DRAWS))
    return Interval(medians[_DRAWS // 100], median(ratios), medians[-1 - _DRAWS // 100], len(ratios))


def verdict(found: Interval) -> str:
    """Return ``slower``, ``faster``, or an empty string if the difference is not significant."""
    if found.num_ratios < FEWEST:
        return ""
    if found.high < 1 and found.middle < 1 - LEAST:
        return "slower"
    if found.low > 1 and found.middle > 1 + LEAST:
        return "faster"
    return ""


class Comparison:
    """Measures two versions in turns.

    :param versions: the other version, and the working tree
    :param busy: a busy process, beside which both are measured too
    :ivar values: one figure per round, by version and metric; for the load time, one per start
    """

    def __init__(
        self,
        versions: tuple[Version, Version],
        *,
        settings: EngineSettings,
        sizes: Sizes,
        prompts: PromptMaker,
        busy: Busy,
    ) -> None:
        self.values: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
        idle: list[Task] = [task for task in make_tasks(sizes) if task.name in TASKS]
        self.tasks = [*idle, *(beside(task, busy, 1) for task in idle if task.name in BESIDE)]
        self._versions = versions
        self._settings = settings
        self._sizes = sizes
        self._prompts = prompts

    @property
    def metrics(self) -> list[Metric]:
        """Return what was measured, in order."""
        return [LOAD, *(metric for task in self.tasks for metric in task.metrics)]

    def start(self, number: int, until: float) -> None:
        """Start both versions and measure some rounds with them, at least one.

        :param until: the time by ``time.monotonic()`` after which no further round is begun
        """
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
                if time.monotonic() > until:
                    break

    def ratios(self, metric: Metric) -> list[float]:
        """Return the ratio of each round; above 1, the working tree is better, whether lower or higher is better."""
        pairs = zip(*(values[metric.key] for values in self.values), strict=True)
        return [after / before if metric.higher_is_better else before / after for before, after in pairs]

    def medians(self) -> dict[str, float]:
        """Return the working tree's medians, with four digits."""
        return {metric.key: float(f"{median(self.values[1][metric.key]):.4g}") for metric in self.metrics}

    def _order(self, number: int) -> tuple[int, int]:
        return (0, 1) if number % 2 else (1, 0)

    def _add(self, which: int, figures: Any) -> None:
        for key, value in figures.items():
            self.values[which].setdefault(key, []).append(value)


def _report(comparison: Comparison, versions: tuple[Version, Version], earlier: Saved | None) -> list[str]:
    """Print the table, and return what got slower."""
    table = Table(title="medians; ratio above 1: the working tree is better")
    columns = ["", versions[0].name, versions[1].name, "ratio", "between", ""]
    if earlier is not None:
        columns += [f"saved on this processor,\n{earlier.day}: {earlier.version}", "ratio"]
    for column in columns:
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
        cells += [f"{found.middle:.3f}", bounds, f"[{color}]{said}[/]"]
        if earlier is not None and metric.key in earlier.figures:
            before, after = earlier.figures[metric.key], median(comparison.values[1][metric.key])
            cells += [as_text(before), f"{after / before if metric.higher_is_better else before / after:.2f}"]
        table.add_row(f"{metric.title}, {metric.unit}", *cells)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return slower


def main(
    against: Annotated[str, typer.Option(help="The commit to compare with; default: the last tag")] = "",
    model: Annotated[str, typer.Option(help="The model, as of `make bench`")] = "smollm2",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds to measure for, two starts of both at least")] = 150,
    save: Annotated[bool, typer.Option("--save", help="Keep the working tree's figures, by processor")] = False,
) -> None:
    """Measure the working tree beside another version of this project."""
    try:
        _console.log("Building the version to compare with, if it is a new one")
        versions = (other_version(against or last_tag()), working_tree())
    except VersionError as error:
        raise typer.BadParameter(str(error), param_hint="--against") from None
    chosen, sizes = benchmark_model(model), evolve(Sizes(), output=96)
    settings = EngineSettings(str(chosen.source), usable_processors(), sizes.max_model_len, max(sizes.streams))
    prompts = PromptMaker(tokenizer_of(chosen.source))
    machine = describe_machine()
    begun, number = time.monotonic(), 0
    with Progress(console=_console) as progress, Busy(1) as busy:
        comparison = Comparison(versions, settings=settings, sizes=sizes, prompts=prompts, busy=busy)
        shown = progress.add_task("measuring in turns", total=seconds)
        while number < 2 or time.monotonic() < begun + seconds:
            # Half of the time for the first start, so that there are at least two starts.
            comparison.start(number, begun + seconds / (2 if number == 0 else 1))
            number += 1
            progress.update(shown, completed=time.monotonic() - begun)
    path = file_of(machine)
    slower = _report(comparison, versions, last_saved(path, chosen.name))
    if save:
        measured = Saved(versions[1].name, date.today().isoformat(), machine["load_average"], comparison.medians())
        keep(path, machine, chosen.name, measured)
        _console.print(f"written to {path}")
    if slower:
        _console.print(f"[red]slower than {versions[0].name}: {', '.join(slower)}[/]")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

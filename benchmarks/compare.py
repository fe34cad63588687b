"""Run `make bench`: compare this project with its peers, on the same file, prompts and threads.

python -m benchmarks.compare --model smollm2 --rounds 3
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from attrs import asdict
from rich.console import Console
from rich.table import Table

from benchmarks.bandwidth import bytes_per_token, read_bandwidth
from benchmarks.environments import OWN, engines_for, installed_engines
from benchmarks.machine import describe_machine
from benchmarks.models import MODELS, BenchmarkModel, benchmark_model
from benchmarks.paths import cache_directory
from benchmarks.process import EngineFailedError, EngineProcess
from benchmarks.prompts import PromptMaker, tokenizer_of
from benchmarks.protocol import EngineSettings, UnsupportedError
from benchmarks.results import Results, as_text
from benchmarks.tasks import (
    LOAD,
    ONE_STREAM,
    QUICK,
    SHARE,
    Figures,
    Metric,
    Sizes,
    Task,
    load_figures,
    make_tasks,
    warm_up,
)
from benchmarks.worker import engine_class
from paged_sdk.system.processors import usable_processors

__all__ = ["Comparison", "confined_to", "names_of", "report"]

# Above this load average, other processes are computing, and the figures are unreliable.
_BUSY = 0.5

_console = Console(stderr=True, log_path=False, highlight=False, width=None if sys.stderr.isatty() else 160)


class Comparison:
    """Runs rounds of fresh processes. Within a round, the engines take turns task by task.

    :param engines: names of the engines, in the order of the table
    :param settings: settings of every engine; a model, if given, replaces path and dtype
    :param model: the model to load; None: the one in the settings
    :param timeout: seconds that one command to an engine may take
    :param versions: directories of other versions of this project, by their names among the engines
    :param apart: run every engine in a separate session
    :ivar bandwidths: memory read bandwidth in bytes per second, by round
    """

    def __init__(
        self,
        *,
        engines: Sequence[str],
        tasks: Sequence[Task],
        sizes: Sizes,
        settings: EngineSettings,
        prompts: PromptMaker,
        timeout: float,
        model: BenchmarkModel | None = None,
        versions: Mapping[str, Path] | None = None,
        apart: bool = False,
    ) -> None:
        self.results = Results(_metrics(tasks), dict.fromkeys(engines, ""))
        self.bandwidths: list[float] = []
        self._model = model
        self._versions = versions or {}
        self._apart = apart
        self._tasks = tasks
        self._sizes = sizes
        self._settings = settings
        self._prompts = prompts
        self._timeout = timeout
        self._given_up: set[tuple[str, str]] = set()

    def run_round(self, number: int) -> None:
        """Run a round, and add its figures to the results. A task at which an engine failed is not run on it again."""
        names = list(self.results.engines)
        self.bandwidths.append(read_bandwidth(self._settings.num_threads, self._sizes.buffer))
        _console.log(f"Round {number}: memory is read at {self.bandwidths[-1] / 1e9:.1f} GB/s")
        first = number % len(names)
        with ExitStack() as stack:
            # Rotate the order, so that no engine is always first.
            started = [self._start(stack, name, f"Round {number}") for name in names[first:] + names[:first]]
            loaded = [engine for engine in started if engine is not None]
            for task in self._tasks:
                for engine in loaded:
                    if (engine.name, task.name) not in self._given_up:
                        self._measure(engine, task, f"Round {number}, {task.name}")

    def _start(self, stack: ExitStack, name: str, key: str) -> EngineProcess | None:
        """Start an engine, measure its load time and warm it up; ``stack`` ends it. Return None if it fails."""
        settings = self._settings_of(name)
        if settings is None:
            self.results.add_reason(name, self.results.metrics, "reads no directory")
            return None
        _console.log(f"{key}: {name} is loading")
        log = cache_directory("logs") / f"{name}.log"
        try:
            source = self._versions.get(name)
            kind = name if source is None else OWN
            engine = EngineProcess(
                kind, settings, log, timeout=self._timeout, source=source, title=name, apart=self._apart
            )
            stack.callback(engine.close)
            self.results.engines[name] = engine.version
            self.results.add(name, load_figures(engine, self._prompts, self._sizes, key))
        except EngineFailedError as error:
            _console.log(f"{name}: {error}")
            self.results.add_reason(name, self.results.metrics, f"failed: {error}")
            return None
        warm_up(engine, self._prompts, self._sizes, f"{key}, warm-up")
        return engine

    def _settings_of(self, name: str) -> EngineSettings | None:
        """Return the settings for an engine; None: it can load none of the model's formats."""
        if self._model is None:
            return self._settings
        path = self._model.path_for(engine_class(OWN if name in self._versions else name).FORMATS)
        return None if path is None else replace(self._settings, model=str(path), dtype=self._model.dtype)

    def _share_of_bandwidth(self, name: str, figures: Figures) -> Figures:
        settings = self._settings_of(name)
        assert settings is not None
        read = bytes_per_token(Path(settings.model)) * figures[ONE_STREAM]
        return {SHARE.key: 100 * read / self.bandwidths[-1]}

    def _measure(self, engine: EngineProcess, task: Task, key: str) -> None:
        if not engine.is_alive:
            self.results.add_reason(engine.name, _metrics_of(task), "failed: the engine had ended by then")
            return
        try:
            figures = task.measure(engine, self._prompts, key)
        except (UnsupportedError, EngineFailedError) as error:
            reason = f"failed: {error}" if isinstance(error, EngineFailedError) else str(error)
            _console.log(f"{key}: {engine.name}: {reason}")
            self.results.add_reason(engine.name, _metrics_of(task), reason)
            self._given_up.add((engine.name, task.name))
            return
        if ONE_STREAM in figures:
            figures = {**figures, **self._share_of_bandwidth(engine.name, figures)}
        shown = ", ".join(f"{metric.key} {as_text(figures[metric.key])} {metric.unit}" for metric in _metrics_of(task))
        _console.log(f"{key}: {engine.name}: {shown}")
        self.results.add(engine.name, figures)


def _metrics_of(task: Task) -> list[Metric]:
    """Return the metrics of a task, including derived ones."""
    return [*task.metrics, *(SHARE for metric in task.metrics if metric.key == ONE_STREAM)]


def _metrics(tasks: Sequence[Task]) -> list[Metric]:
    return [LOAD, *(metric for task in tasks for metric in _metrics_of(task))]


@contextmanager
def confined_to(num_cpus: int) -> Iterator[None]:
    """Pin this process and the engines that it starts to ``num_cpus`` CPUs within this context, since libraries may
    ignore their settings of threads.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:num_cpus])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _as_table(results: Results, title: str) -> Table:
    table = Table(title=title)
    table.add_column("")
    for name, version in results.engines.items():
        table.add_column(f"{name}\n{version}", justify="right")
    table.add_column("own / best peer", justify="right")
    for metric in results.metrics:
        medians = [results.median(engine, metric) for engine in results.engines]
        cells = ["-" if value is None else as_text(value) for value in medians]
        ratio = results.ratio(metric)
        shown = "" if ratio is None else f"{ratio.value:.2f} ({ratio.peer})"
        table.add_row(f"{metric.title}, {metric.unit}", *cells, shown)
    return table


def report(comparison: Comparison, *, title: str, about: Mapping[str, Any], target: Path) -> None:
    """Print a run's table, with reasons for missing figures; write everything to a JSON file.

    :param about: descriptions of the run and the machine
    """
    results = comparison.results
    written = {
        "command": " ".join([f"python -m benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        **about,
        "bandwidth_gb_per_s": [round(bandwidth / 1e9, 2) for bandwidth in comparison.bandwidths],
        **results.as_json(),
    }
    target.write_text(json.dumps(written, indent=2) + "\n")
    bandwidth = f"memory read at {median(comparison.bandwidths) / 1e9:.1f} GB/s"
    Console(width=None if sys.stdout.isatty() else 160).print(_as_table(results, f"{title}; {bandwidth}"))
    for name, reasons in results.reasons.items():
        for reason in dict.fromkeys(reasons.values()):
            _console.print(f"{name}: {reason}", highlight=False)
    _console.print(f"written to {target}")


def names_of(value: str, allowed: Sequence[str], option: str) -> list[str]:
    """Return the names in a comma-separated list.

    :raises typer.BadParameter: a name is not allowed
    """
    names = [name.strip() for name in value.split(",") if name.strip()]
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: allowed are {', '.join(allowed)}", param_hint=option)
    return names


def main(
    model: Annotated[
        str, typer.Option(help=f"{', '.join(MODELS)}, or the path of a GGUF file; with -bf16 or -f16: dense weights")
    ] = "smollm2",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with fresh processes")] = 3,
    engines: Annotated[str, typer.Option(help="Names by commas; default: all that are installed")] = "",
    only: Annotated[str, typer.Option(help="Names of tasks by commas; default: all")] = "",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each engine; default: all CPUs")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that an engine has for one task's requests")] = 60,
    depth: Annotated[int, typer.Option(min=1, help="Tokens of the long prompt")] = Sizes().depth,
    isa: Annotated[str | None, typer.Option(help="Hold every engine to this instruction set: avx2")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file; default: in the cache directory")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny lengths: shows that it runs, measures nothing")] = False,
) -> None:
    """Measure this project beside every peer that is installed (make bench-peers)."""
    sizes = QUICK if quick else Sizes(depth=depth)
    if not (allowed := engines_for(isa)):
        raise typer.BadParameter(f"{isa}: no engine can be held to it", param_hint="--isa")
    names = names_of(engines, allowed, "--engines") or installed_engines(isa)
    tasks = names_of(only, [task.name for task in make_tasks(sizes)], "--only")
    chosen, num_threads, machine = benchmark_model(model), threads or usable_processors(), describe_machine()
    if machine["load_average"] > _BUSY:
        _console.print(f"[yellow]The machine is busy (load {machine['load_average']}): do not trust the figures.[/]")
    comparison = Comparison(
        engines=names,
        tasks=[task for task in make_tasks(sizes) if not tasks or task.name in tasks],
        sizes=sizes,
        settings=EngineSettings("", num_threads, sizes.max_model_len, max(sizes.streams), isa=isa),
        prompts=PromptMaker(tokenizer_of(chosen.source)),
        timeout=timeout,
        model=chosen,
    )
    with confined_to(num_threads):
        for number in range(1, rounds + 1):
            comparison.run_round(number)
    about = {
        "machine": machine,
        "model": chosen.name,
        "threads": num_threads,
        "isa": isa,
        "rounds": rounds,
        "quick": quick,
        "sizes": asdict(sizes),
    }
    suffix = "".join(f"-{part}" for part in (isa, "quick" if quick else None) if part)
    target = output or cache_directory("results") / f"{chosen.file_name}{suffix}.json"
    held, worth = f"{isa} alone, " if isa else "", " (quick: no measurement)" if quick else ""
    title = f"{chosen.name}, {held}{num_threads} threads, medians of {rounds}{worth}"
    report(comparison, title=title, about=about, target=target)
    if OWN not in comparison.results.values:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

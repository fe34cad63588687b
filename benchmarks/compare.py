"""`make bench`: this project beside its peers, on the same file, prompts and threads.

python -m benchmarks.compare --model smollm2 --rounds 3
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from attrs import asdict, evolve, frozen
from rich.console import Console
from rich.table import Table

from benchmarks.environments import ENGINES, OWN, installed_engines
from benchmarks.machine import describe_machine, usable_cpus
from benchmarks.models import bfloat16_checkpoint, model_path
from benchmarks.paths import cache_directory
from benchmarks.process import EngineFailedError, EngineProcess
from benchmarks.prompts import PromptMaker
from benchmarks.protocol import EngineSettings, UnsupportedError
from benchmarks.results import Results
from benchmarks.tasks import LOAD, QUICK, Sizes, Task, load_figures, make_tasks, warm_up
from benchmarks.worker import engine_class
from paged_sdk.chat.text_processor import text_processor_from_gguf
from paged_sdk.weights.checkpoint import open_checkpoint

__all__ = ["compare"]

# Above this load something else is computing, and the figures are worth little.
_BUSY = 0.5

_console = Console(stderr=True, log_path=False, highlight=False, width=None if sys.stderr.isatty() else 160)


@frozen(kw_only=True)
class Comparison:
    """One run.

    :ivar engines: names, in the order of the table
    :ivar settings: of every engine, with the path of the GGUF file
    """

    engines: Sequence[str]
    tasks: Sequence[Task]
    sizes: Sizes
    settings: EngineSettings
    rounds: int
    prompts: PromptMaker

    def run(self) -> Results:
        """Rounds of fresh processes; within a round, task by task, the engines take turns."""
        results = Results([LOAD, *(metric for task in self.tasks for metric in task.metrics)])
        for index in range(self.rounds):
            # Nobody always goes first.
            order = [*self.engines[index % len(self.engines) :], *self.engines[: index % len(self.engines)]]
            with ExitStack() as stack:
                loaded = [
                    engine
                    for name in order
                    if (engine := self._start(stack, name, f"Round {index + 1}", results)) is not None
                ]
                for task in self.tasks:
                    for engine in loaded:
                        self._measure(engine, task, f"Round {index + 1}, {task.name}", results)
        return evolve(results, engines={name: results.engines[name] for name in self.engines})

    def _start(self, stack: ExitStack, name: str, key: str, results: Results) -> EngineProcess | None:
        _console.log(f"{key}: {name} is loading")
        results.engines.setdefault(name, "")
        try:
            settings = self._settings_of(name)
            engine = EngineProcess(name, settings, cache_directory("logs") / f"{name}.log")
            stack.callback(engine.close)
            results.engines[name] = engine.version
            results.add(name, load_figures(engine, self.prompts, self.sizes, key))
            warm_up(engine, self.prompts, self.sizes, f"{key}, warm-up")
        except EngineFailedError as error:
            _console.log(f"{name}: {error}")
            results.add_reason(name, results.metrics, str(error))
            return None
        return engine

    def _settings_of(self, name: str) -> EngineSettings:
        if engine_class(name).FORMAT == "gguf":
            return self.settings
        path = bfloat16_checkpoint(Path(self.settings.model))
        return EngineSettings(
            str(path), self.settings.num_threads, self.settings.max_model_len, self.settings.max_num_seqs
        )

    def _measure(self, engine: EngineProcess, task: Task, key: str, results: Results) -> None:
        try:
            figures = task.measure(engine, self.prompts, key)
        except UnsupportedError as error:
            results.add_reason(engine.name, task.metrics, str(error))
            return
        except EngineFailedError as error:
            _console.log(f"{engine.name}, {task.name}: {error}")
            results.add_reason(engine.name, task.metrics, f"failed: {error}")
            return
        shown = ", ".join(f"{metric.key} {figures[metric.key]:.4g} {metric.unit}" for metric in task.metrics)
        _console.log(f"{key}: {engine.name}: {shown}")
        results.add(engine.name, figures)


def compare(
    *,
    model: Path,
    engines: Sequence[str],
    only: Sequence[str] = (),
    rounds: int,
    num_threads: int,
    sizes: Sizes,
) -> Results:
    """Run the comparison.

    :param only: names of tasks; empty: all
    """
    checkpoint = open_checkpoint(model)
    assert checkpoint.metadata is not None
    tokenizer = text_processor_from_gguf(checkpoint.metadata).tokenizer
    checkpoint.source.close()
    settings = EngineSettings(
        model=str(model),
        num_threads=num_threads,
        max_model_len=sizes.max_model_len,
        max_num_seqs=max(sizes.streams),
    )
    return Comparison(
        engines=engines,
        tasks=[task for task in make_tasks(sizes) if not only or task.name in only],
        sizes=sizes,
        settings=settings,
        rounds=rounds,
        prompts=PromptMaker(tokenizer),
    ).run()


@contextmanager
def _confined_to(num_cpus: int) -> Iterator[None]:
    """Engines inherit it: nobody has more CPUs than threads, whatever a library makes of its settings."""
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
        cells = ["-" if value is None else f"{value:,.4g}" for value in medians]
        ratio = results.ratio(metric)
        shown = "" if ratio is None else f"{ratio.value:.2f} ({ratio.peer})"
        table.add_row(f"{metric.title}, {metric.unit}", *cells, shown)
    return table


def _names(value: str, allowed: Sequence[str], option: str) -> list[str]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: allowed are {', '.join(allowed)}", param_hint=option)
    return names


def main(
    model: Annotated[str, typer.Option(help="smollm2, qwen1.5b, or the path of a GGUF file")] = "smollm2",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with fresh processes")] = 3,
    engines: Annotated[str, typer.Option(help="Names by commas; default: all that are installed")] = "",
    only: Annotated[str, typer.Option(help="Names of tasks by commas; default: all")] = "",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each engine; default: all CPUs")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file; default: in the cache directory")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny lengths: shows that it runs, measures nothing")] = False,
) -> None:
    """Measure this project beside every peer that is installed (make bench-peers)."""
    sizes = QUICK if quick else Sizes()
    names = _names(engines, ENGINES, "--engines") or installed_engines()
    tasks = _names(only, [task.name for task in make_tasks(sizes)], "--only")
    path, num_threads, machine = model_path(model), threads or usable_cpus(), describe_machine()
    if machine["load_average"] > _BUSY:
        _console.print(f"[yellow]The machine is busy (load {machine['load_average']}): do not trust the figures.[/]")
    with _confined_to(num_threads):
        results = compare(model=path, engines=names, only=tasks, rounds=rounds, num_threads=num_threads, sizes=sizes)
    report = {
        "command": " ".join(["python -m benchmarks.compare", *sys.argv[1:]]),
        "machine": machine,
        "model": path.name,
        "threads": num_threads,
        "rounds": rounds,
        "quick": quick,
        "sizes": asdict(sizes),
        **results.as_json(),
    }
    target = output or cache_directory("results") / f"{path.stem}.json"
    target.write_text(json.dumps(report, indent=2) + "\n")
    title = f"{path.name}, {num_threads} threads, medians of {rounds}" + (" (quick: no measurement)" if quick else "")
    Console(width=None if sys.stdout.isatty() else 160).print(_as_table(results, title))
    for name, reasons in results.reasons.items():
        for reason in dict.fromkeys(reasons.values()):
            _console.print(f"{name}: {reason}", highlight=False)
    _console.print(f"written to {target}")
    if OWN not in results.values:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

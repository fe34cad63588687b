"""Measure how well engines share the machine: with busy processes, and with a second model.

python -m benchmarks.neighbours [--model smollm2] [--engines paged_sdk,llama_cpp] [--rounds 3]

A busy process is a plain loop at normal priority, not pinned to a CPU. Each engine is measured on an idle machine,
beside one and beside two busy processes, in turns, so that other load affects all measurements. With two threads on two
CPUs, an engine's fair share of CPU time is 0.67 beside one busy process and 0.50 beside two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Annotated, Final, TypeAlias

import typer
from attrs import asdict

from benchmarks.busy import Busy, beside
from benchmarks.compare import Comparison, confined_to, names_of, report
from benchmarks.environments import ENGINES, OWN, installed_engines
from benchmarks.machine import describe_machine
from benchmarks.models import MODELS, benchmark_model
from benchmarks.paths import cache_directory
from benchmarks.process import EngineProcess
from benchmarks.prompts import PromptMaker, tokenizer_of
from benchmarks.protocol import EngineSettings, Prompt, RequestTimes
from benchmarks.tasks import QUICK, Figures, Metric, Sizes, Task, decode_rate, make_tasks
from benchmarks.versions import VersionError, other_version
from paged_sdk.system.processors import usable_processors

__all__ = ["neighbour_tasks"]

PROCESSES: Final = (1, 2)
PAIRS: Final = (1, 4)
"""Numbers of streams on each of two models."""


def neighbour_tasks(sizes: Sizes, busy: Busy, turns: int) -> list[Task]:
    """Return the tasks for each engine.

    :param turns: how often a task alternates between the conditions that it compares; figures are medians over them
    """
    names = (*(f"decode-{streams}" for streams in sizes.streams), "prefix")
    alone = [_beside(task, busy, turns) for task in make_tasks(sizes) if task.name in names]
    pairs = [
        _pair(opened, title, sizes=sizes, streams=streams, turns=turns)
        for opened, title in ((_one_process, "two models in a process"), (_two_processes, "two processes"))
        for streams in PAIRS
    ]
    return [*alone, _idle_cpu(sizes), *pairs]


def _beside(task: Task, busy: Busy, turns: int) -> Task:
    """Return a task that measures another task's first figure idle and beside busy processes, and their ratios."""
    numbers = (0, *PROCESSES)
    tasks = {number: beside(task, busy, number) for number in numbers}
    rates = {number: tasks[number].metrics[0] for number in numbers}
    shares = {
        number: Metric(f"{rates[number].key}_share", f"{rates[number].title}, of idle", "x") for number in PROCESSES
    }

    def measure(engine: EngineProcess, prompts: PromptMaker, key: str) -> Figures:
        found: dict[int, list[float]] = {number: [] for number in numbers}
        for turn in range(turns):
            for number in numbers:
                figures = tasks[number].measure(engine, prompts, f"{key}.{turn}.{number}")
                found[number].append(figures[rates[number].key])
        speeds = {rates[number].key: median(found[number]) for number in numbers}
        return speeds | {shares[number].key: _median_share(found[number], found[0]) for number in PROCESSES}

    return Task(task.name, tuple(metric for number in numbers for metric in _of(number, rates, shares)), measure)


def _of(number: int, *kinds: dict[int, Metric]) -> list[Metric]:
    return [kind[number] for kind in kinds if number in kind]


def _median_share(found: Sequence[float], whole: Sequence[float]) -> float:
    return median(part / of for part, of in zip(found, whole, strict=True))


def _idle_cpu(sizes: Sizes) -> Task:
    metric = Metric("idle_cpu", "CPU one second after the last token, of one core", "%", higher_is_better=False)

    def measure(engine: EngineProcess, prompts: PromptMaker, key: str) -> Figures:
        prompt = prompts.make(sizes.prompt, key)
        return {metric.key: 100 * engine.idle_cpu([prompt], sizes.output, after=1.0, seconds=1.0)}

    return Task("idle-cpu", (metric,), measure)


# Generates a number of tokens for a batch on one model and for another batch on a second model, concurrently.
_OnTwo: TypeAlias = Callable[[list[Prompt], list[Prompt], int], list[RequestTimes]]


@contextmanager
def _one_process(engine: EngineProcess) -> Iterator[_OnTwo]:
    def on_two(one: list[Prompt], other: list[Prompt], max_tokens: int) -> list[RequestTimes]:
        return list(chain(*engine.generate_on_two(one, other, max_tokens)))

    yield on_two


@contextmanager
def _two_processes(engine: EngineProcess) -> Iterator[_OnTwo]:
    with closing(engine.another()) as second, ThreadPoolExecutor(1) as threads:

        def on_two(one: list[Prompt], other: list[Prompt], max_tokens: int) -> list[RequestTimes]:
            times = threads.submit(second.generate, other, max_tokens)
            return [*engine.generate(one, max_tokens), *times.result()]

        yield on_two


def _pair(
    open_pair: Callable[[EngineProcess], AbstractContextManager[_OnTwo]],
    title: str,
    *,
    sizes: Sizes,
    streams: int,
    turns: int,
) -> Task:
    """Return a task that measures the total speed of two models, and its ratio to that of one alone."""
    name = f"{title.replace(' ', '_')}_{streams}"
    title = f"{title}, {streams} stream{'s' if streams > 1 else ''} each"
    rate, share = Metric(name, f"{title}, sum", "tok/s"), Metric(f"{name}_share", f"{title}, sum, of one alone", "x")

    def measure(engine: EngineProcess, prompts: PromptMaker, key: str) -> Figures:
        def batch(which: str) -> list[Prompt]:
            return [prompts.make(sizes.prompt, f"{key}.{which}.{index}") for index in range(streams)]

        alone: list[float] = []
        both: list[float] = []
        with open_pair(engine) as on_two:
            on_two(batch("first a"), batch("first b"), 4)  # warms up, and loads the second model
            for turn in range(turns):
                alone.append(decode_rate(engine.generate(batch(f"{turn}"), sizes.output)))
                both.append(decode_rate(on_two(batch(f"{turn} a"), batch(f"{turn} b"), sizes.output)))
        return {rate.key: median(both), share.key: _median_share(both, alone)}

    return Task(f"{open_pair.__name__.strip('_').replace('_', '-')}-{streams}", (rate, share), measure)


def main(
    model: Annotated[
        str, typer.Option(help=f"{', '.join(MODELS)}, or the path of a GGUF file; with -bf16 or -f16: dense weights")
    ] = "smollm2",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with fresh processes")] = 3,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a round: idle, beside one, beside two, idle ...")] = 2,
    engines: Annotated[str, typer.Option(help="Names by commas; default: this one and its installed peers")] = "",
    only: Annotated[str, typer.Option(help="Names of tasks by commas; default: all")] = "",
    against: Annotated[str, typer.Option(help="A commit of this project to measure beside the others")] = "",
    apart: Annotated[bool, typer.Option("--apart", help="Engines and busy processes in sessions of their own")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each engine; default: all CPUs")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that an engine has for one batch")] = 120,
    output: Annotated[Path | None, typer.Option(help="JSON file; default: in the cache directory")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny lengths: shows that it runs, measures nothing")] = False,
) -> None:
    """Measure this project and its peers beside busy processes, and beside a second model of their own."""
    sizes = QUICK if quick else Sizes()
    peers = [name for name in installed_engines() if name == OWN or not name.startswith(OWN)]
    names = names_of(engines, ENGINES, "--engines") or peers
    try:
        before = {f"{OWN} {against}": other_version(against).source} if against else {}
    except VersionError as error:
        raise typer.BadParameter(str(error), param_hint="--against") from None
    chosen, num_threads, machine = benchmark_model(model), threads or usable_processors(), describe_machine()
    about = {"machine": machine, "model": chosen.name, "threads": num_threads, "rounds": rounds, "turns": turns}
    with confined_to(num_threads), Busy(max(PROCESSES)) as busy:
        tasks = neighbour_tasks(sizes, busy, turns)
        wanted = names_of(only, [task.name for task in tasks], "--only")
        comparison = Comparison(
            engines=[*names, *before],
            tasks=[task for task in tasks if not wanted or task.name in wanted],
            sizes=sizes,
            settings=EngineSettings("", num_threads, sizes.max_model_len, max(sizes.streams)),
            prompts=PromptMaker(tokenizer_of(chosen.source)),
            timeout=timeout,
            model=chosen,
            versions=before,
            apart=apart,
        )
        for number in range(1, rounds + 1):
            comparison.run_round(number)
    title = f"{chosen.name}, {num_threads} threads, {turns} turns in each of {rounds} rounds"
    target = output or cache_directory("results") / f"neighbours-{chosen.file_name}{'-quick' if quick else ''}.json"
    report(
        comparison, title=title, about=about | {"apart": apart, "quick": quick, "sizes": asdict(sizes)}, target=target
    )
    if OWN in names and OWN not in comparison.results.values:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

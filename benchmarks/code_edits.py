"""Measure the gain by drafts: edits of this project's code, prose, and several concurrent texts.

python -m benchmarks.code_edits --model qwen1.5b                 all edits, prose, 4 and 16 streams
python -m benchmarks.code_edits --edits 4 --prose 2 --streams 0  a quick impression

One model without speculation and one with it are loaded; they take turns, request by request. Each edit is requested
without drafts, with the old code as a prediction, and from the speculating model. llama.cpp is measured too if it is
installed, with and without its prompt lookup. Every request has its own cache salt, so that no answer is drafted from
an earlier one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import typer
from attrs import evolve, field, frozen
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.edits import EDITS
from benchmarks.environments import installed_engines
from benchmarks.machine import describe_machine
from benchmarks.models import benchmark_model
from benchmarks.paths import cache_directory
from benchmarks.process import EngineProcess
from benchmarks.protocol import EngineSettings, Prompt
from paged_sdk import Model, SamplingParams, SpeculativeConfig, TextModelBuilder
from paged_sdk.chat.text_processor import TextProcessor, text_processor_from_gguf
from paged_sdk.system.processors import usable_processors
from paged_sdk.types.messages import parse_messages
from paged_sdk.weights.checkpoint import open_checkpoint

__all__ = ["Answer", "Asked", "Report", "measure"]

PLAIN: Final = "plain"
SUFFIX: Final = "suffix"
PREDICTION: Final = "prediction"
LLAMA: Final = "llama.cpp"
LOOKUP: Final = "llama.cpp, lookup"
_PROSE: Final = (
    "Write a short story about a lighthouse keeper who finds a map.",
    "Explain to a child why the sky is blue and sunsets are red.",
    "Describe the morning routine of a baker in a small town.",
    "What should somebody consider who wants to learn to play the cello at forty?",
    "Write a letter from a sailor to his sister about a storm.",
    "Tell the history of the bicycle.",
    "Compare living by the sea with living in the mountains.",
    "Give advice to somebody who moves to another country.",
)
_MAX_MODEL_LEN: Final = 2048


@frozen
class Asked:
    """Holds a request.

    :ivar kind: "edits" or "prose"
    :ivar prediction: the predicted answer; empty: no prediction
    """

    kind: str
    prompt: Prompt
    prediction: str = ""


@frozen
class Answer:
    """Holds the answer to a request.

    :ivar rate: tokens per second after the first token
    """

    text: str
    num_tokens: int
    rate: float


@frozen
class Report:
    """Holds tokens per second by workload and way: one number per request or, for concurrent streams, per round.

    :ivar different: how many answers differ from the plain ones, by way
    """

    rates: dict[str, dict[str, list[float]]] = field(factory=dict)
    different: dict[str, int] = field(factory=dict)
    stats: dict[str, Any] = field(factory=dict)

    def add(self, what: str, way: str, rate: float) -> None:
        """Add a rate."""
        self.rates.setdefault(what, {}).setdefault(way, []).append(rate)

    def speed_up(self, what: str, way: str) -> float | None:
        """Return the median over requests of a way's speed relative to the plain way."""
        rates = self.rates[what]
        if way not in rates:
            return None
        return median(one / other for one, other in zip(rates[way], rates[PLAIN], strict=True))


def make_requests(text: TextProcessor, *, edits: int, prose: int) -> list[Asked]:
    """Make the requests of the workload."""

    def prompt(question: str) -> Prompt:
        return Prompt(question, text.encode_chat(parse_messages([{"role": "user", "content": question}])))

    found = [Asked("edits", prompt(edit.question), edit.prediction) for edit in EDITS[:edits]]
    return found + [Asked("prose", prompt(question)) for question in _PROSE[:prose]]


async def ask(model: Model, asked: Asked, max_tokens: int, salt: str, *, predicts: bool = False) -> Answer:
    """Send a request to a model.

    :param salt: cache salt, which separates requests that must not share anything
    :param predicts: pass the request's prediction
    """
    response = await model.send_completion_request(
        asked.prompt.token_ids,
        evolve(SamplingParams.deterministic(), max_len=max_tokens),
        cache_salt=salt,
        prediction=asked.prediction if predicts else None,
    )
    usage = response.usage
    return Answer(response.choices[0].text, usage.completion_tokens, usage.avg_compl_tok_per_sec)


async def measure_alone(
    models: Mapping[str, Model],
    requests: Sequence[Asked],
    llamas: Mapping[str, EngineProcess],
    report: Report,
    **how: Any,
) -> None:
    """Generate each answer in every way, one after another."""
    max_tokens, progress = how["max_tokens"], how["progress"]
    task = progress.add_task("one text at a time", total=len(requests))
    for number, asked in enumerate(requests):
        ways = [PLAIN, SUFFIX, PREDICTION] if asked.prediction else [PLAIN, SUFFIX]
        answers: dict[str, Answer] = {}
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            model = models[SUFFIX if way == SUFFIX else PLAIN]
            salt = f"{number} {way}"
            await ask(model, asked, 1, salt)  # computes the prompt, which is not measured
            answers[way] = await ask(model, asked, max_tokens, salt, predicts=way == PREDICTION)
        for way, answer in answers.items():
            report.add(asked.kind, way, answer.rate)
            report.different[way] = report.different.get(way, 0) + (answer.text != answers[PLAIN].text)
        for way, engine in llamas.items():
            (times,) = engine.generate([asked.prompt], max(answers[PLAIN].num_tokens, 2))
            report.add(asked.kind, way, (times.num_tokens - 1) / (times.last - times.first))
        progress.advance(task)


async def measure_together(
    models: Mapping[str, Model], requests: Sequence[Asked], streams: int, report: Report, **how: Any
) -> None:
    """Generate several answers concurrently, with both models in turns."""
    max_tokens, progress = how["max_tokens"], how["progress"]
    for kind in ("edits", "prose"):
        some = [asked for asked in requests if asked.kind == kind]
        if not some:
            continue
        chosen = [some[place % len(some)] for place in range(streams)]
        task = progress.add_task(f"{streams} at a time: {kind}", total=2 * how["rounds"])
        for round_number in range(how["rounds"]):
            for way in (PLAIN, SUFFIX) if round_number % 2 else (SUFFIX, PLAIN):
                model, salt = models[way], f"{streams} {kind} {round_number}"
                await asyncio.gather(*(ask(model, each, 1, f"{salt} {at}") for at, each in enumerate(chosen)))
                begun = time.perf_counter()
                answers = await asyncio.gather(
                    *(ask(model, each, max_tokens, f"{salt} {at}") for at, each in enumerate(chosen))
                )
                seconds = time.perf_counter() - begun
                report.add(f"{kind}, {streams} streams", way, sum(each.num_tokens for each in answers) / seconds)
                progress.advance(task)


async def measure(
    builder: TextModelBuilder,
    requests: Sequence[Asked],
    llamas: Mapping[str, EngineProcess],
    *,
    gamma: int,
    max_tokens: int,
    streams: Sequence[int],
    rounds: int,
    progress: Progress,
) -> Report:
    """Measure both models, and llama.cpp with single texts."""
    report = Report()
    how = {"max_tokens": max_tokens, "rounds": rounds, "progress": progress}
    async with AsyncExitStack() as stack:
        models = {
            PLAIN: await stack.enter_async_context(builder.build()),
            SUFFIX: await stack.enter_async_context(builder.with_speculation(SpeculativeConfig(gamma)).build()),
        }
        await measure_alone(models, requests, llamas, report, **how)
        for count in streams:
            await measure_together(models, requests, count, report, **how)
        for way, model in models.items():
            stats = model.stats()
            report.stats[way] = {
                "drafted_tokens": stats.drafted_tokens,
                "accepted_tokens": stats.accepted_tokens,
                "draft_speed_up": stats.draft_speed_up,
            }
    return report


def as_table(report: Report, title: str) -> Table:
    """Return the medians, and speeds relative to the plain way."""
    ways = [PLAIN, SUFFIX, PREDICTION, LLAMA, LOOKUP]
    shown = [way for way in ways if any(way in rates for rates in report.rates.values())]
    table = Table(title=f"{title}: median tokens per second (times the plain rate)")
    table.add_column("")
    for way in shown:
        table.add_column(way, justify="right")
    for what, rates in report.rates.items():
        cells = []
        for way in shown:
            speed_up = report.speed_up(what, way)
            cells.append("" if speed_up is None else f"{median(rates[way]):.1f} ({speed_up:.2f})")
        table.add_row(what, *cells)
    return table


def main(
    model: Annotated[str, typer.Option(help="The model, as of `make bench`")] = "qwen1.5b",
    edits: Annotated[int, typer.Option(min=0, max=len(EDITS), help="How many edits to ask for")] = len(EDITS),
    prose: Annotated[int, typer.Option(min=0, max=len(_PROSE), help="How many answers in prose")] = len(_PROSE),
    streams: Annotated[list[int] | None, typer.Option(help="Texts at a time; may be repeated; 0: none")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often several texts at a time are measured")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="The longest answer")] = 512,
    gamma: Annotated[int, typer.Option(min=1, help="The most drafts of a text in one step")] = 16,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    peers: Annotated[bool, typer.Option(help="Measure llama.cpp too, if it is installed")] = True,
    output: Annotated[Path | None, typer.Option(help="JSON file; default: in the cache directory")] = None,
) -> None:
    """Measure edits of code, prose, and several texts at a time, with drafts and without."""
    chosen = benchmark_model(model)
    checkpoint = open_checkpoint(chosen.source)
    assert checkpoint.metadata is not None, "only GGUF files have their tokenizer inside"
    checkpoint.source.close()
    requests = make_requests(text_processor_from_gguf(checkpoint.metadata), edits=edits, prose=prose)
    num_threads = threads or usable_processors()
    builder = TextModelBuilder(chosen.source).with_num_threads(num_threads).with_max_model_len(_MAX_MODEL_LEN)
    console = Console(width=None if sys.stdout.isatty() else 140)
    llamas: dict[str, EngineProcess] = {}
    try:
        if peers and "llama_cpp" in installed_engines():
            for way, lookup in ((LLAMA, 0), (LOOKUP, gamma)):
                settings = EngineSettings(str(chosen.source), num_threads, _MAX_MODEL_LEN, 1, lookup=lookup)
                log = cache_directory("logs") / f"code-edits-{lookup}.log"
                llamas[way] = EngineProcess("llama_cpp", settings, log, timeout=300)
        with Progress(console=Console(stderr=True)) as progress:
            found = measure(
                builder,
                requests,
                llamas,
                gamma=gamma,
                max_tokens=max_tokens,
                streams=[count for count in (streams or [4, 16]) if count],
                rounds=rounds,
                progress=progress,
            )
            report = asyncio.run(found)
    finally:
        for engine in llamas.values():
            engine.close()
    saved = {
        "command": " ".join(["python -m benchmarks.code_edits", *sys.argv[1:]]),
        "machine": describe_machine(),
        "model": chosen.name,
        "gamma": gamma,
        "rates": report.rates,
        "different": report.different,
        "stats": report.stats,
    }
    target = output or cache_directory("results") / f"{chosen.file_name}-code-edits.json"
    target.write_text(json.dumps(saved, indent=2) + "\n")
    console.print(as_table(report, chosen.name))
    console.print("answers that are another text than the plain one:", report.different)
    console.print("drafts:", report.stats)
    console.print(f"written to {target}")


if __name__ == "__main__":
    typer.run(main)

"""Measure a model beside itself with a draft model: its own first layers.

python -m benchmarks.draft_pair --model qwen1.5b --layers 8    8 of 28 layers, as cut off
python -m benchmarks.draft_pair --model smollm2 --layers 30    all layers: every draft should be right, none can pay

Nobody trained the first layers to end there, so few of their guesses are right: what is measured is that texts stay the
same and how little a draft model costs that does not pay, as well as how often its guesses were right.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import typer
from attrs import evolve, field, frozen
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.edits import EDITS
from benchmarks.first_layers import write_first_layers
from benchmarks.machine import describe_machine
from benchmarks.models import benchmark_model
from benchmarks.paths import cache_directory
from paged_sdk import (
    GgufModelBuilder,
    Model,
    ModelStats,
    RequestBuilder,
    SamplingParams,
    SpeculativeConfig,
    TextMessageRole,
    TextSpeculativeBuilder,
)
from paged_sdk.processors import usable_processors

__all__ = ["Report", "measure"]

_PROSE: Final = (
    "Write a short story about a lighthouse keeper who finds a map.",
    "Explain to a child why the sky is blue and sunsets are red.",
    "Tell the history of the bicycle.",
)


@frozen
class Report:
    """Holds what was measured.

    :ivar ratios: by request, the rate of tokens with drafts by the rate without
    :ivar rates: the rates without
    :ivar different: the numbers of the texts that were others with drafts
    """

    ratios: list[float] = field(factory=list)
    rates: list[float] = field(factory=list)
    different: list[int] = field(factory=list)


async def _ask(model: Model, question: str, max_tokens: int) -> tuple[str, float]:
    sampling = evolve(SamplingParams.deterministic(), max_len=max_tokens)
    request = RequestBuilder().add_message(TextMessageRole.USER, question).with_sampling(sampling)
    response = await model.send_chat_request(request)
    return response.choices[0].message.content or "", response.usage.avg_compl_tok_per_sec


async def measure(
    target: GgufModelBuilder,
    draft: GgufModelBuilder,
    *,
    gamma: int,
    num_edits: int,
    max_tokens: int,
    progress: Progress,
) -> tuple[Report, ModelStats]:
    """Ask both for the same texts, request by request."""
    report = Report()
    questions = [*_PROSE, *(edit.question for edit in EDITS[:num_edits])]
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(target.build())
        pair = TextSpeculativeBuilder(target, draft, SpeculativeConfig(gamma))
        drafting = await stack.enter_async_context(pair.build())
        for number, question in enumerate(progress.track(questions, description="texts")):
            models = (plain, drafting) if number % 2 else (drafting, plain)
            found = {model: await _ask(model, question, max_tokens) for model in models}
            (text, rate), (other, other_rate) = found[plain], found[drafting]
            report.ratios.append(other_rate / rate)
            report.rates.append(rate)
            if text != other:
                report.different.append(number)
        return report, drafting.stats()


def main(
    model: Annotated[str, typer.Option(help="The model, as of `make bench`")] = "qwen1.5b",
    layers: Annotated[int, typer.Option(min=1, help="How many of its layers make the draft model")] = 8,
    gamma: Annotated[int, typer.Option(min=1, help="The most drafts of a text in one step")] = 16,
    edits: Annotated[int, typer.Option(min=0, max=len(EDITS), help="How many edits of code, beside prose")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="The longest text")] = 160,
    batch_invariance: Annotated[bool, typer.Option(help="One arithmetic for any number of rows")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON file; default: in the cache directory")] = None,
) -> None:
    """Measure a model with its own first layers as its draft model."""
    chosen = benchmark_model(model)
    path = cache_directory("models") / f"{chosen.source.stem}-first-{layers}.gguf"
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        write_first_layers(unfinished, chosen.source, layers)
        unfinished.rename(path)
    target = GgufModelBuilder(chosen.source).with_num_threads(usable_processors()).with_max_model_len(2048)
    if batch_invariance:
        target = target.with_batch_invariance()
    console = Console(width=None if sys.stdout.isatty() else 120)
    with Progress(console=Console(stderr=True)) as progress:
        report, stats = asyncio.run(
            measure(
                target,
                GgufModelBuilder(path),
                gamma=gamma,
                num_edits=edits,
                max_tokens=max_tokens,
                progress=progress,
            )
        )
    acceptance = stats.accepted_tokens / max(stats.drafted_tokens, 1)
    table = Table("", "", title=f"{chosen.name} with its first {layers} layers as draft model")
    table.add_row("tokens per second without drafts, median", f"{median(report.rates):.1f}")
    table.add_row("with drafts, times as fast: least, median, most", _spread(report.ratios))
    table.add_row("drafts that were right", f"{stats.accepted_tokens} of {stats.drafted_tokens} ({acceptance:.0%})")
    table.add_row("speed-up by the engine's own account", f"{stats.draft_speed_up:.3f}")
    table.add_row("other texts", f"{len(report.different)} of {len(report.ratios)}")
    console.print(table)
    saved = {
        "command": " ".join(["python -m benchmarks.draft_pair", *sys.argv[1:]]),
        "machine": describe_machine(),
        "model": chosen.name,
        "layers": layers,
        "ratios": report.ratios,
        "rates": report.rates,
        "different": report.different,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
    }
    place = output or cache_directory("results") / f"{chosen.file_name}-draft-pair.json"
    place.write_text(json.dumps(saved, indent=2) + "\n")
    console.print(f"written to {place}")


def _spread(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} {median(ratios):.2f} {max(ratios):.2f}"


if __name__ == "__main__":
    typer.run(main)

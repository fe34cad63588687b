"""Compare a model with itself with a draft model: its own first layers.

python -m benchmarks.draft_pair --model qwen1.5b --layers 8    the first 8 of 28 layers
python -m benchmarks.draft_pair --model smollm2 --layers 30    all layers: every draft should be accepted, none can pay

The first layers were not trained as a model, so few of their drafts are accepted. This measures that texts stay the
same, how little a draft model costs that does not pay, and the acceptance rate.
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
from paged_sdk.system.processors import usable_processors

__all__ = ["Report", "measure"]

PLAIN: Final = "plain"
SUFFIX: Final = "suffix drafts"
PAIR: Final = "draft model and suffix drafts"
_WAYS: Final = (PLAIN, SUFFIX, PAIR)

_PROSE: Final = (
    "Write a short story about a lighthouse keeper who finds a map.",
    "Explain to a child why the sky is blue and sunsets are red.",
    "Tell the history of the bicycle.",
)


@frozen
class Report:
    """Holds the results by way of generating.

    :ivar rates: tokens per second of each request, by way
    :ivar different: numbers of the texts that differ with a draft model
    :ivar stats: the engine's counters at the end, by way
    """

    rates: dict[str, list[float]] = field(factory=lambda: {way: [] for way in _WAYS})
    different: list[int] = field(factory=list)
    stats: dict[str, ModelStats] = field(factory=dict)

    def ratios(self, way: str) -> list[float]:
        """Return a way's speed relative to the plain way, by request."""
        return [rate / plain for rate, plain in zip(self.rates[way], self.rates[PLAIN], strict=True)]


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
) -> Report:
    """Generate the same texts in every way, request by request."""
    report, config = Report(), SpeculativeConfig(gamma)
    questions = [*_PROSE, *(edit.question for edit in EDITS[:num_edits])]
    async with AsyncExitStack() as stack:
        models = {
            PLAIN: await stack.enter_async_context(target.build()),
            SUFFIX: await stack.enter_async_context(target.with_speculation(config).build()),
            PAIR: await stack.enter_async_context(TextSpeculativeBuilder(target, draft, config).build()),
        }
        for number, question in enumerate(progress.track(questions, description="texts")):
            turn = number % len(_WAYS)
            texts: dict[str, str] = {}
            for way in _WAYS[turn:] + _WAYS[:turn]:
                texts[way], rate = await _ask(models[way], question, max_tokens)
                report.rates[way].append(rate)
            if texts[PLAIN] != texts[PAIR]:
                report.different.append(number)
        report.stats.update((way, model.stats()) for way, model in models.items())
    return report


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
        report = asyncio.run(
            measure(
                target,
                GgufModelBuilder(path),
                gamma=gamma,
                num_edits=edits,
                max_tokens=max_tokens,
                progress=progress,
            )
        )
    table = Table("", "tokens/s", "times plain: least, median, most", "drafts that were right", "by its own account")
    table.title = f"{chosen.name} with its first {layers} layers as draft model"
    for way, rates in report.rates.items():
        stats, ratios = report.stats[way], report.ratios(way)
        right = f"{stats.accepted_tokens} of {stats.drafted_tokens}"
        spread = f"{min(ratios):.2f} {median(ratios):.2f} {max(ratios):.2f}"
        table.add_row(way, f"{median(rates):.1f}", spread, right, f"{stats.draft_speed_up:.3f}")
    console.print(table)
    console.print(f"other texts with a draft model: {len(report.different)} of {len(report.rates[PLAIN])}")
    saved = {
        "command": " ".join(["python -m benchmarks.draft_pair", *sys.argv[1:]]),
        "machine": describe_machine(),
        "model": chosen.name,
        "layers": layers,
        "rates": report.rates,
        "different": report.different,
        "drafted_tokens": {way: stats.drafted_tokens for way, stats in report.stats.items()},
        "accepted_tokens": {way: stats.accepted_tokens for way, stats in report.stats.items()},
    }
    place = output or cache_directory("results") / f"{chosen.file_name}-draft-pair.json"
    place.write_text(json.dumps(saved, indent=2) + "\n")
    console.print(f"written to {place}")


if __name__ == "__main__":
    typer.run(main)

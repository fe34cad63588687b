"""Measure the gain from drafting the tokens that a JSON schema forces, instead of generating each in its own step.

python -m benchmarks.forced_json --model smollm2    messages to a shop, described in compact JSON, 1, 4 and 16 at a time

One model answers each message with forced tokens as drafts and, in turns, with one token per step.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import typer
from attrs import field, frozen
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.models import benchmark_model
from benchmarks.paths import cache_directory
from paged_sdk import Constraint, GgufModelBuilder, Model, RequestBuilder, SamplingParams, TextModelBuilder
from paged_sdk.build.assembly import load_parts
from paged_sdk.config.env import read_environment
from paged_sdk.scheduler.sequence import Sequence as TokenSequence
from paged_sdk.speculative.forced_tokens import ForcedTokens
from paged_sdk.speculative.several_proposers import SeveralProposers

__all__ = ["Report", "measure"]

FORCED: Final = "forced tokens together"
PLAIN: Final = "one token a step"
_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "customer_sentiment": {"enum": ["positive", "neutral", "negative"]},
        "product_category": {"enum": ["clothing", "electronics", "furniture", "groceries", "other"]},
        "is_refund_requested": {"type": "boolean"},
        "urgency_from_1_to_5": {"type": "integer", "minimum": 1, "maximum": 5},
        "number_of_items": {"type": "integer", "minimum": 1, "maximum": 99},
        "summary": {"type": "string", "maxLength": 50},
    },
    "required": [
        "customer_sentiment",
        "product_category",
        "is_refund_requested",
        "urgency_from_1_to_5",
        "number_of_items",
        "summary",
    ],
    "additionalProperties": False,
}
_MESSAGES: Final = (
    "The two chairs came with a broken leg each. I want my money back.",
    "Thank you, the headphones are wonderful and came a day early!",
    "Where is my order of six shirts? I have been waiting for three weeks.",
    "Half of the oranges were rotten. Please send me new ones before Sunday.",
    "Can the lamp be returned if it does not fit our table?",
    "My new phone does not charge, and I need it for work tomorrow.",
    "You sent me five blue coats although I had ordered one.",
    "The bookshelf is fine, but the manual is in a language that I cannot read.",
)


@frozen
class Report:
    """Holds speeds with and without forced tokens as drafts, by number of concurrent answers.

    :ivar speed_ups: speed with forced tokens as drafts relative to without, by round
    :ivar rates: tokens per second, by way
    :ivar num_tokens: tokens of all answers
    :ivar num_forced: how many of these were forced
    :ivar num_different: how many answers differ from those without
    """

    speed_ups: dict[int, list[float]] = field(factory=dict)
    rates: dict[int, dict[str, list[float]]] = field(factory=dict)
    num_tokens: int = 0
    num_forced: int = 0
    num_different: int = 0


class _Switched:
    """Proposes forced tokens as drafts while ``is_on``, and no drafts otherwise."""

    def __init__(self) -> None:
        self.is_on = False
        self._forced = ForcedTokens(SeveralProposers(()))

    def propose(self, sequences: Sequence[TokenSequence]) -> list[list[int]]:
        return self._forced.propose(sequences) if self.is_on else [[] for _ in sequences]

    def forget(self, seq_ids: Iterable[int]) -> None:
        self._forced.forget(seq_ids)

    def reset(self) -> None:
        self._forced.reset()


async def _seconds(model: Model, messages: Sequence[str], max_tokens: int) -> tuple[float, list[str], int, int]:
    """Generate answers concurrently; return the seconds, the answers, and the numbers of tokens and forced tokens."""
    constraint = Constraint.json_schema(_SCHEMA, compact=True)
    sampling = SamplingParams(temperature=0.0, max_len=max_tokens)
    question = f"Describe a customer's message as JSON of this schema: {json.dumps(_SCHEMA)}\n\nThe message: "
    requests = [
        RequestBuilder().add_message("user", question + message).with_sampling(sampling).with_constraint(constraint)
        for message in messages
    ]
    begun = time.perf_counter()
    responses = await model.send_chat_requests(requests)
    seconds = time.perf_counter() - begun
    usages = [response.usage for response in responses]
    return (
        seconds,
        [str(response.choices[0].message.content) for response in responses],
        sum(usage.completion_tokens for usage in usages),
        sum(usage.completion_tokens_details.forced_tokens for usage in usages),
    )


async def measure(
    builder: TextModelBuilder | GgufModelBuilder, *, streams: Sequence[int], rounds: int, max_tokens: int
) -> Report:
    """Measure each number of concurrent answers.

    The prompts are in the prefix cache except for their last tokens, so that only decode is measured.
    """
    speed_ups: dict[int, list[float]] = {}
    rates: dict[int, dict[str, list[float]]] = {}
    num_tokens = num_forced = num_different = 0
    switched = _Switched()
    async with Model(load_parts(builder.source, builder.settings, read_environment({}), proposer=switched)) as model:
        for message in _MESSAGES:
            await _seconds(model, [message], 2)
        for count in streams:
            speed_ups[count], rates[count] = [], {FORCED: [], PLAIN: []}
            for number in range(rounds):
                messages = [_MESSAGES[(number + place) % len(_MESSAGES)] for place in range(count)]
                taken: dict[str, float] = {}
                texts: dict[str, list[str]] = {}
                for way in (FORCED, PLAIN) if number % 2 else (PLAIN, FORCED):
                    switched.is_on = way == FORCED
                    taken[way], texts[way], tokens, forced = await _seconds(model, messages, max_tokens)
                    rates[count][way].append(tokens / taken[way])
                num_tokens, num_forced = num_tokens + tokens, num_forced + forced
                num_different += sum(a != b for a, b in zip(texts[FORCED], texts[PLAIN], strict=True))
                speed_ups[count].append(taken[PLAIN] / taken[FORCED])
    return Report(speed_ups, rates, num_tokens, num_forced, num_different)


def as_table(report: Report, title: str) -> Table:
    """Return the medians."""
    table = Table(title=f"{title}: compact JSON of a fixed schema, median tokens per second")
    for column in ("answers at a time", PLAIN, FORCED, "times as fast"):
        table.add_column(column, justify="right")
    for count, speed_ups in report.speed_ups.items():
        rates = report.rates[count]
        ends = f"{median(speed_ups):.2f} ({min(speed_ups):.2f} to {max(speed_ups):.2f})"
        table.add_row(str(count), f"{median(rates[PLAIN]):.1f}", f"{median(rates[FORCED]):.1f}", ends)
    return table


def main(
    model: Annotated[str, typer.Option(help="The model, as of `make bench`")] = "smollm2",
    streams: Annotated[list[int] | None, typer.Option(min=1, help="Answers at a time; may be repeated")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="The longest answer")] = 200,
    output: Annotated[Path | None, typer.Option(help="JSON file; default: in the cache directory")] = None,
) -> None:
    """Measure compact JSON with forced tokens and without."""
    chosen = benchmark_model(model)
    builder = GgufModelBuilder(chosen.source).with_max_model_len(2048)
    report = asyncio.run(measure(builder, streams=streams or [1, 4, 16], rounds=rounds, max_tokens=max_tokens))
    saved = {
        "command": " ".join(["python -m benchmarks.forced_json", *sys.argv[1:]]),
        "machine": describe_machine(),
        "model": chosen.name,
        "speed_ups": report.speed_ups,
        "rates": report.rates,
        "num_tokens": report.num_tokens,
        "num_forced": report.num_forced,
        "num_different": report.num_different,
    }
    target = output or cache_directory("results") / f"{chosen.file_name}-forced-json.json"
    target.write_text(json.dumps(saved, indent=2) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(as_table(report, chosen.name))
    console.print(f"{report.num_forced} of {report.num_tokens} tokens were forced")
    console.print(f"answers that are another text than without: {report.num_different}")
    console.print(f"written to {target}")


if __name__ == "__main__":
    typer.run(main)

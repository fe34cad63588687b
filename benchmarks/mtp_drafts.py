"""Measure what a model's layer for multi-token prediction gains, or its assistant, by how often it is right.

python -m benchmarks.mtp_drafts                              random weights of Qwen3.5-0.8B, and a layer
python -m benchmarks.mtp_drafts --model gemma4-e2b-random    those of Gemma 4 E2B, and an assistant

Weights are random, so drafts are never right by themselves: they are computed, and tokens of the text or wrong ones are
put in their place, which are right in 0, 50, 70, 80 and 90 % of the guesses. Everything else is as it is with trained
weights, the choice of the number of drafts included.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Annotated, Final
from unittest.mock import patch

import typer
from attrs import define, field
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.models import assistant_path, benchmark_model
from paged_sdk import (
    GgufModelBuilder,
    Model,
    SamplingParams,
    SpeculativeConfig,
    TextModelBuilder,
    TextSpeculativeBuilder,
)
from paged_sdk.build.assembly import load_parts
from paged_sdk.config.env import read_environment
from paged_sdk.runner.drafted_text import DraftedText
from paged_sdk.scheduler.sequence import Sequence as TokenSequence

_PROMPT: Final = [(7 * place) % 1000 + 10 for place in range(15)]
_RATES: Final = (0.0, 0.5, 0.7, 0.8, 0.9)


@define
class _Known:
    """Puts tokens of known texts in place of drafts.

    :ivar rate: how often they are right
    :ivar texts: the tokens after each prompt, by the first token of the prompt
    """

    rate: float = 0.0
    texts: dict[int, list[int]] = field(factory=dict)
    chance: random.Random = field(factory=lambda: random.Random(0))

    def add(self, text: DraftedText, token: int) -> int:
        """Return the token that a draft becomes."""
        sequence = text.sequence
        known = self.texts.get(sequence.token_ids[0], [])
        place = sequence.num_output_tokens + len(text.drafts)
        is_right = place < len(known) and self.chance.random() < self.rate
        return known[place] if is_right else (token + 1) % 1000


@define
class _Watching:
    """Proposes nothing, and keeps the sequences that it is asked about.

    :ivar sequences: by the first token of the prompt
    """

    sequences: dict[int, TokenSequence] = field(factory=dict)

    def propose(self, sequences: Sequence[TokenSequence]) -> list[list[int]]:
        self.sequences |= {sequence.token_ids[0]: sequence for sequence in sequences}
        return [[] for _ in sequences]

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""


async def _measure(name: str, gamma: int, num_texts: int, num_tokens: int, rounds: int) -> Table:
    # Without a prefix cache, texts that have ended propose nothing for those of the next turn, which are the same.
    builder = GgufModelBuilder(benchmark_model(name).gguf or "").with_force_cpu().with_prefix_cache_n(0)
    known, watching, real = _Known(), _Watching(), DraftedText.add

    def add(self: DraftedText, token: int, vocab_size: int) -> None:
        real(self, known.add(self, token), vocab_size)

    table = Table("drafts right", "tok/s", "ratio", "drafts per step", "tokens per step", title=f"{name}, {num_texts}")
    parts = load_parts(builder.source, builder.settings, read_environment({}), proposer=watching)
    async with Model(parts) as plain:
        await _seconds(plain, num_texts, num_tokens)
        base = median([await _seconds(plain, num_texts, num_tokens) for _ in range(rounds)])
    known.texts = {first: sequence.output_token_ids for first, sequence in watching.sequences.items()}
    table.add_row("no drafts", f"{num_texts * num_tokens / base:.0f}", "1", "", "1")
    assistant = assistant_path(name)
    drafting = (
        builder.with_speculation(SpeculativeConfig(gamma=gamma, mtp=True))
        if assistant is None
        else TextSpeculativeBuilder(builder, TextModelBuilder(assistant), SpeculativeConfig(gamma=gamma))
    )
    with patch.object(DraftedText, "add", add):
        for rate in track(_RATES, console=Console(stderr=True)):
            known.rate = rate
            async with drafting.build() as model:  # anew: it learns how often drafts are right
                await _seconds(model, num_texts, num_tokens)
                before = model.stats()
                seconds = median([await _seconds(model, num_texts, num_tokens) for _ in range(rounds)])
                after = model.stats()
            steps = after.steps - before.steps
            drafted, made = (after.drafted_tokens - before.drafted_tokens) / num_texts, rounds * num_tokens
            speed = f"{num_texts * num_tokens / seconds:.0f}", f"{base / seconds:.2f}"
            table.add_row(f"{rate:.0%}", *speed, f"{drafted / steps:.2f}", f"{made / steps:.2f}")
    return table


async def _seconds(model: Model, num_texts: int, num_tokens: int) -> float:
    sampling = SamplingParams(temperature=1.0, top_k=20, seed=7, max_len=num_tokens, ignore_eos=True)
    began = time.perf_counter()
    await asyncio.gather(*(model.send_completion_request(each, sampling) for each in _prompts(num_texts)))
    return time.perf_counter() - began


def _prompts(num_texts: int) -> Sequence[list[int]]:
    return [[2000 + text, *_PROMPT] for text in range(num_texts)]


def main(
    model: Annotated[
        str, typer.Option(help="a model of benchmarks.models, or a GGUF file")
    ] = "qwen3.5-0.8b-mtp-random",
    gamma: Annotated[int, typer.Option(help="most drafts per text and step")] = 8,
    texts: Annotated[int, typer.Option(help="texts at a time")] = 1,
    tokens: Annotated[int, typer.Option(help="length of a text")] = 150,
    rounds: Annotated[int, typer.Option(help="turns of each rate")] = 3,
) -> None:
    """Print tokens per second, prompts of 16 tokens included."""
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(asyncio.run(_measure(model, gamma, texts, tokens, rounds)))
    machine = describe_machine()
    console.print(machine["cpu"], machine["commit"])


if __name__ == "__main__":
    typer.run(main)

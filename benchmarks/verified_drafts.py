"""Measure what drafts gain by how many of them are right, apart from who proposes them.

python -m benchmarks.verified_drafts --model qwen3.5-0.8b-random    0, 2, 4 and 8 drafts per step, all and none right

A proposer that knows the text gives every step so many drafts. A model verifies them together with the token before
them; with recurrent layers, states then go through those that were right. Texts must stay the same.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from statistics import median
from typing import Annotated, Final

import typer
from attrs import define, field
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.models import benchmark_model
from paged_sdk import GgufModelBuilder, Model, SamplingParams, SpeculativeConfig
from paged_sdk.build.assembly import load_parts
from paged_sdk.config.env import read_environment
from paged_sdk.scheduler.sequence import Sequence as TokenSequence

_PROMPT: Final = [(7 * place) % 1000 + 10 for place in range(200)]
_COUNTS: Final = (2, 4, 8)


@define
class _Informed:
    """Proposes the tokens of a known text, or others.

    :ivar tokens: the text after the prompt; empty: nothing is proposed
    :ivar sequence: the last sequence for which drafts were asked
    """

    count: int = 0
    are_right: bool = True
    tokens: list[int] = field(factory=list)
    sequence: TokenSequence | None = None

    def propose(self, sequences: Sequence[TokenSequence]) -> list[list[int]]:
        for sequence in sequences:
            self.sequence = sequence
        return [self._next(sequence.num_output_tokens) for sequence in sequences]

    def _next(self, place: int) -> list[int]:
        drafts = self.tokens[place : place + self.count]
        return drafts if self.are_right else [token + 1 for token in drafts]

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Do nothing: nothing is learned."""

    def reset(self) -> None:
        """Do nothing."""


async def _measure(name: str, num_tokens: int, rounds: int) -> Table:
    builder = GgufModelBuilder(benchmark_model(name).gguf or "").with_force_cpu()
    builder = builder.with_speculation(SpeculativeConfig(gamma=max(_COUNTS)))
    proposer, sampling = _Informed(), SamplingParams(temperature=0.0, max_len=num_tokens, ignore_eos=True)
    ways = [(0, True), *((count, right) for right in (True, False) for count in _COUNTS)]
    async with AsyncExitStack() as stack:
        parts = load_parts(builder.source, builder.settings, read_environment({}), proposer=proposer)
        model = await stack.enter_async_context(Model(parts))
        plain = await _tokens(model, proposer, sampling)
        seconds: dict[tuple[int, bool], list[float]] = {way: [] for way in ways}
        for _ in track(range(rounds), console=Console(stderr=True)):
            for way in ways:
                proposer.count, proposer.are_right = way
                proposer.tokens = plain if way[0] else []
                began = time.perf_counter()
                found = await _tokens(model, proposer, sampling)
                seconds[way].append(time.perf_counter() - began)
                if found != plain:
                    raise SystemExit(f"{way[0]} drafts, {'right' if way[1] else 'wrong'}: another text")
    table = Table("drafts per step", "all right: tok/s", "ratio", "all wrong: tok/s", "ratio", title=name)
    base = median(seconds[0, True])
    table.add_row("0", f"{num_tokens / base:.0f}", "1", f"{num_tokens / base:.0f}", "1")
    for count in _COUNTS:
        right, wrong = median(seconds[count, True]), median(seconds[count, False])
        rates = (f"{num_tokens / right:.0f}", f"{base / right:.2f}", f"{num_tokens / wrong:.0f}", f"{base / wrong:.2f}")
        table.add_row(str(count), *rates)
    return table


async def _tokens(model: Model, proposer: _Informed, sampling: SamplingParams) -> list[int]:
    """Return the tokens of a completion, whose prompt is computed once: it is in the prefix cache afterwards."""
    await model.send_completion_request(_PROMPT, sampling)
    assert proposer.sequence is not None
    return proposer.sequence.output_token_ids


def main(
    model: Annotated[str, typer.Option(help="a model of benchmarks.models, or a GGUF file")] = "qwen3.5-0.8b-random",
    tokens: Annotated[int, typer.Option(help="length of the text")] = 100,
    rounds: Annotated[int, typer.Option(help="turns of each way")] = 5,
) -> None:
    """Print tokens per second, prompts included, which are cached."""
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(asyncio.run(_measure(model, tokens, rounds)))
    machine = describe_machine()
    console.print(machine["cpu"], machine["commit"])


if __name__ == "__main__":
    typer.run(main)

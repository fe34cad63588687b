"""Measure what sampling adds to a decode step.

python -m benchmarks.sampling_cost --model smollm2 --streams 16

Rounds of greedy and sampled texts of the same prompts and lengths alternate in one engine.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.constraint_cost import run_round
from benchmarks.step_rounds import ModelName, Rounds, StepRounds, Streams, Threads, Tokens
from paged_sdk import SamplingParams

__all__ = ["SETTINGS"]

SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "temperature 1": {"temperature": 1.0},
        "0.8, top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
        "1, top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
        "0.7, top-k 20, top-p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        "the same, repetition penalty 1.05": {
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.8,
            "repetition_penalty": 1.05,
        },
        "1, min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
        "greedy, 5 logprobs": {"temperature": 0.0, "top_n_logprobs": 5},
        "temperature 1, 5 logprobs": {"temperature": 1.0, "top_n_logprobs": 5},
    }
)
"""Settings that checkpoints recommend, and logprobs, by a description."""


def main(
    model: ModelName = "smollm2",
    streams: Streams = 16,
    tokens: Tokens = 96,
    rounds: Rounds = 4,
    threads: Threads = None,
) -> None:
    """Compare steps of sampled and of greedy texts."""
    step_rounds = StepRounds.of(model, streams, rounds, threads)
    ways = {
        "greedy": SamplingParams.deterministic(),
        # Seeded, so that all rounds of one kind generate the same texts.
        **{name: SamplingParams(seed=7, **settings) for name, settings in SETTINGS.items()},
    }

    async def run() -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        async with step_rounds.open() as (built, prompts):
            await run_round(built, prompts, 8, None)
            for _ in range(rounds):
                for name, params in ways.items():
                    found = await run_round(built, prompts, tokens, None, params)
                    seconds[name].append(found.seconds / found.steps)
        return seconds

    seconds = asyncio.run(run())
    table = Table(title=step_rounds.title)
    for heading in ("sampling", "ms per step", "times a greedy step"):
        table.add_column(heading, justify="left" if heading == "sampling" else "right")
    for name, own in seconds.items():
        share = statistics.median(one / other for one, other in zip(own, seconds["greedy"], strict=True))
        table.add_row(name, f"{statistics.median(own) * 1e3:.3f}", f"{share:.3f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

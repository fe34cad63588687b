"""Measure what sampling adds to a decode step.

python -m benchmarks.sampling_cost --model smollm2 --streams 16

Rounds of greedy and sampled texts of the same prompts and lengths alternate in one engine.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.constraint_cost import run_round
from benchmarks.inside import open_engine
from benchmarks.models import model_path
from benchmarks.prompts import PromptMaker
from paged_sdk import SamplingParams, TextModelBuilder
from paged_sdk.system.processors import usable_processors

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
    model: Annotated[str, typer.Option(help="smollm2, qwen1.5b, or the path of a GGUF file")] = "smollm2",
    streams: Annotated[int, typer.Option(min=1)] = 16,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each text")] = 96,
    rounds: Annotated[int, typer.Option(min=1)] = 4,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Compare steps of sampled and of greedy texts."""
    path, num_threads = model_path(model), threads or usable_processors()
    torch.set_num_threads(num_threads)
    ways = {
        "greedy": SamplingParams.deterministic(),
        # Seeded, so that all rounds of one kind generate the same texts.
        **{name: SamplingParams(seed=7, **settings) for name, settings in SETTINGS.items()},
    }

    async def run() -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        builder = TextModelBuilder(path).with_num_threads(num_threads).with_max_num_seqs(streams)
        engine = open_engine(builder)
        maker = PromptMaker(engine.parts.text.tokenizer)
        async with engine.start() as built:
            prompts = [maker.make(64, f"Stream {index}").token_ids for index in range(streams)]
            await run_round(built, prompts, 8, None)
            for _ in range(rounds):
                for name, params in ways.items():
                    found = await run_round(built, prompts, tokens, None, params)
                    seconds[name].append(found.seconds / found.steps)
        return seconds

    seconds = asyncio.run(run())
    table = Table(title=f"{path.name}: {streams} streams, {num_threads} threads, {rounds} rounds")
    for heading in ("sampling", "ms per step", "times a greedy step"):
        table.add_column(heading, justify="left" if heading == "sampling" else "right")
    for name, own in seconds.items():
        share = statistics.median(one / other for one, other in zip(own, seconds["greedy"], strict=True))
        table.add_row(name, f"{statistics.median(own) * 1e3:.3f}", f"{share:.3f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

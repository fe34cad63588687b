"""Measure the speed of embedding and scoring texts, against the same texts as prompts of one-token completions.

python -m benchmarks.reading_cost
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from paged_sdk import Model, SamplingParams, TextModelBuilder, embedded_model_path

__all__ = ["main"]


def _texts(generator: random.Random, count: int, length: int) -> list[list[int]]:
    return [[generator.randrange(100, 40_000) for _ in range(length)] for _ in range(count)]


async def _seconds(run: Callable[[], Awaitable[Any]]) -> float:
    begun = time.perf_counter()
    await run()
    return time.perf_counter() - begun


async def _as_prompts(model: Model, texts: list[list[int]]) -> None:
    one = SamplingParams(temperature=0.0, max_len=1)
    await asyncio.gather(*(model.send_completion_request(text, one) for text in texts))


async def _measure(path: str, num_texts: int, length: int, rounds: int) -> None:
    console, generator = Console(), random.Random(0)
    times: dict[str, list[float]] = {}
    # The prefix cache is reset before each call, so only texts of one call share prefixes.
    async with TextModelBuilder(path).build() as model:

        async def time_of(name: str, run: Callable[[], Awaitable[Any]]) -> None:
            await model.reset_prefix_cache()
            times.setdefault(name, []).append(await _seconds(run))

        await _as_prompts(model, _texts(generator, num_texts, length))
        for _ in range(rounds):
            texts = _texts(generator, num_texts, length)
            await time_of("a token each", partial(_as_prompts, model, texts))
            await time_of("vectors, last", partial(model.embed, texts, pooling="last"))
            await time_of("vectors, mean", partial(model.embed, texts, pooling="mean"))
            await time_of("scores", partial(model.score, texts))
        num_tokens = num_texts * length
        for name, seconds in times.items():
            console.print(
                f"{num_texts} texts of {length} tokens, {name}: {median(seconds):.3f} s, "
                f"{num_tokens / median(seconds):,.0f} tok/s, {median(seconds) / median(times['a token each']):.2f}"
            )
        for _ in range(rounds):
            (prefix,), ends = _texts(generator, 1, 1000), _texts(generator, 16, 8)
            await time_of("1", partial(model.score, ends[:1], prefix=prefix))
            await time_of("16", partial(model.score, ends, prefix=prefix))
        one, all_ends = median(times["1"]), median(times["16"])
        console.print(
            f"8 tokens after 1000: {one:.3f} s, 16 times 8 after the same 1000: {all_ends:.3f} s, {all_ends / one:.2f}"
        )


def main(
    model: Annotated[str, typer.Argument(help="A directory, a file or a hub id")] = "",
    texts: Annotated[int, typer.Option(min=1, help="How many texts")] = 64,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="How often")] = 5,
) -> None:
    """Print seconds and rates."""
    asyncio.run(_measure(model or str(embedded_model_path()), texts, length, rounds))


if __name__ == "__main__":
    typer.run(main)

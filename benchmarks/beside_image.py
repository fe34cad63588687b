"""Measure the time between tokens of running texts while images are encoded.

python -m benchmarks.beside_image

The model is that of :mod:`benchmarks.repeated_image`: Qwen2-VL-2B's shape and random weights, in bfloat16.
"""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from benchmarks.paths import cache_directory
from benchmarks.repeated_image import write_model
from benchmarks.timings import first_token_about
from paged_sdk import Model, RequestBuilder, SamplingParams, TextMessages, VisionModelBuilder

__all__ = ["main"]


async def _stream(model: Model, number: int, times: list[float], over: asyncio.Event) -> None:
    """Generate a text until ``over`` is set, and record the time of each token."""
    messages = TextMessages().add_message("user", f"What is {number}?")
    sampling = SamplingParams(temperature=0.0, max_len=10_000, ignore_eos=True)
    # Random weights may generate tokens without text. With logprobs, a stream yields a chunk for these too.
    request = RequestBuilder.from_messages(messages).with_sampling(sampling).with_logprobs()
    async with model.stream_chat_request(request) as stream:
        async for _ in stream:
            times.append(time.perf_counter())
            if over.is_set():
                return


def _gaps(times: list[list[float]], begin: float, end: float) -> list[float]:
    """Return the seconds between consecutive tokens within a period."""
    pairs = ((one, two) for each in times for one, two in pairwise(each))
    return [two - one for one, two in pairs if begin <= one and two <= end]


async def _measure(side: int, num_streams: int, rounds: int) -> None:
    console, draw = Console(), np.random.default_rng(0)
    directory = cache_directory("qwen2-vl-2b-random")
    write_model(directory)
    async with VisionModelBuilder(directory).with_logging().build() as model:

        async def seconds_about(image: Any) -> float:
            seconds, _ = await first_token_about(model, image, "What is this?")
            return seconds

        alone = await seconds_about(draw.integers(0, 256, (side, side, 3), np.uint8))
        over = asyncio.Event()
        times: list[list[float]] = [[] for _ in range(num_streams)]
        streams = [
            asyncio.create_task(_stream(model, number, each, over)) for number, each in enumerate(times, start=1)
        ]
        await asyncio.sleep(3.0)  # until all texts have begun
        begin = time.perf_counter()
        await asyncio.sleep(5.0)
        plain = _gaps(times, begin, time.perf_counter())
        beside: list[float] = []
        seconds: list[float] = []
        for _ in range(rounds):
            begin = time.perf_counter()
            seconds.append(await seconds_about(draw.integers(0, 256, (side, side, 3), np.uint8)))
            beside += _gaps(times, begin, time.perf_counter())
        over.set()
        await asyncio.gather(*streams)
    for name, gaps in (("without", plain), ("beside", beside)):
        worst = sorted(gaps)[int(len(gaps) * 0.99)]
        console.print(f"{name} an image: a token after {median(gaps):.3f} s, of 100 one after {worst:.3f} s")
    console.print(f"{side} x {side} pixels: {median(seconds):.2f} s to the first token, {alone:.2f} s alone")
    console.print(f"tokens take {median(beside) / median(plain):.2f} times as long")


def main(
    side: Annotated[int, typer.Option(min=56, help="Pixels in height and in width")] = 448,
    streams: Annotated[int, typer.Option(min=1, help="How many texts")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="How many images, one after the other")] = 2,
) -> None:
    """Print the seconds between tokens."""
    asyncio.run(_measure(side, streams, rounds))


if __name__ == "__main__":
    typer.run(main)

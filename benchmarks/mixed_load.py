"""Measure how the prefill of a long prompt slows running decodes down, and vice versa.

python -m benchmarks.mixed_load [--model smollm2] [--streams 8] [--prompt 4000] [--rounds 5]

In each round, the prompt first runs alone. Then the streams generate, first alone and then during the prefill of
another such prompt. The table shows the time between two tokens of a stream, over all streams, and the prompt's time to
first token: medians of the rounds, and of each round's ratios. Only public names of the package are used, so
`PYTHONPATH=OTHER/src:. python -m benchmarks.mixed_load` measures another version.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median, quantiles

from attrs import frozen
from rich.console import Console
from rich.table import Table

from benchmarks.models import MODELS, model_path
from benchmarks.timings import first_token
from paged_sdk import GgufModelBuilder, Model, SamplingParams

__all__ = ["Round", "main", "measure_round"]

STREAM_PROMPT = 32
"""Prompt tokens of each stream; few in comparison with the tokens that it generates."""
WARM_UP = 0.5  # seconds that the streams generate before they are measured


@frozen
class Round:
    """Holds the times of one round, in seconds.

    :ivar before: times between tokens of the streams alone
    :ivar beside: times between tokens of the streams during the prefill
    :ivar alone: the prompt's time to first token alone
    :ivar first: the prompt's time to first token while the streams run
    """

    before: list[float]
    beside: list[float]
    alone: float
    first: float

    @property
    def slower_tokens(self) -> float:
        """Return the factor by which the prefill increases the 99th percentile of the time between tokens."""
        return percentile(self.beside, 99) / percentile(self.before, 99)

    @property
    def later_first(self) -> float:
        """Return the factor by which the streams increase the prompt's time to first token."""
        return self.first / self.alone


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of at least two values."""
    return quantiles(values, n=100, method="inclusive")[percent - 1]


async def read(model: Model, prompt: list[int], times: list[float], begun: asyncio.Event) -> None:
    """Record the time of each token of a stream until the task is cancelled."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    async with model.stream_completion_request(prompt, sampling=sampling) as stream:
        async for _ in stream:
            begun.set()
            times.append(time.perf_counter())


async def measure_round(
    model: Model, make_prompt: Callable[[int], list[int]], *, num_streams: int, num_prompt: int, seconds: float
) -> Round:
    """Measure one round.

    :param make_prompt: makes a new prompt of a number of tokens
    :param seconds: how long the streams generate alone
    """
    alone = await first_token(model, make_prompt(num_prompt))
    times: list[list[float]] = [[] for _ in range(num_streams)]
    begun = [asyncio.Event() for _ in times]
    tasks = [
        asyncio.create_task(read(model, make_prompt(STREAM_PROMPT), each, event))
        for each, event in zip(times, begun, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    await asyncio.sleep(WARM_UP)
    begin = time.perf_counter()
    await asyncio.sleep(seconds)
    middle = time.perf_counter()
    first = await first_token(model, make_prompt(num_prompt))
    end = time.perf_counter()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    def between(start: float, stop: float) -> list[float]:
        return [later - earlier for each in times for earlier, later in pairwise(each) if start < later <= stop]

    return Round(between(begin, middle), between(middle, end), alone, first)


def as_table(title: str, rounds: Sequence[Round]) -> Table:
    """Make the table of some rounds."""
    table = Table(title=title)
    for heading in ("ms, medians of the rounds", "by itself", "beside", "ratio"):
        table.add_column(heading, justify="left" if heading.startswith("ms") else "right")

    def add_row(name: str, figures: Sequence[tuple[float, float]]) -> None:
        before, beside = (median(each[side] for each in figures) for side in (0, 1))
        ratio = median(each[1] / each[0] for each in figures)
        table.add_row(name, f"{before * 1e3:,.1f}", f"{beside * 1e3:,.1f}", f"{ratio:.2f}")

    for percent in (50, 99):
        figures = [(percentile(each.before, percent), percentile(each.beside, percent)) for each in rounds]
        add_row(f"between tokens, p{percent}", figures)
    add_row("the prompt's first token", [(each.alone, each.first) for each in rounds])
    return table


async def run(arguments: argparse.Namespace) -> None:
    """Load the model and measure."""
    rng = random.Random(7)

    def make_prompt(length: int) -> list[int]:
        return [rng.randrange(1000, 20000) for _ in range(length)]

    path = model_path(arguments.model)
    builder = GgufModelBuilder(str(path.parent), [path.name]).with_prefix_cache_n(None)
    if arguments.budget is not None:
        builder = builder.with_max_num_batched_tokens(arguments.budget)
    if arguments.slowdown is not None:
        builder = builder.with_max_slowdown(arguments.slowdown)
    async with builder.build() as model:
        settings = {"num_streams": arguments.streams, "num_prompt": arguments.prompt, "seconds": arguments.seconds}
        await measure_round(model, make_prompt, **settings)
        rounds = [await measure_round(model, make_prompt, **settings) for _ in range(arguments.rounds)]
    title = f"{path.name}: {arguments.streams} streams, a prompt of {arguments.prompt:,} tokens, {len(rounds)} rounds"
    Console().print(as_table(title, rounds))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt (default 4000)")
    parser.add_argument("--seconds", type=float, default=1.5, help="how long streams generate by themselves")
    parser.add_argument("--budget", type=int, help="max_num_batched_tokens, if not the default")
    parser.add_argument("--slowdown", type=float, help="max_slowdown, if not the default")
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

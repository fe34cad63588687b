"""Measure the time to first token of short requests during the prefill of long prompts.

python -m benchmarks.short_beside_long [--model smollm2] [--long 8000] [--short 30] [--rounds 3]

In each round, two long prompts run alone, then two others run while a short request arrives every second. The table
shows steps and seconds until a short request's first token, and the slowdown of the long ones. Only public names of the
package are used, so `PYTHONPATH=OTHER/src:. python -m benchmarks.short_beside_long` measures another version.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from statistics import median

from attrs import frozen

from benchmarks.models import MODELS, model_path
from benchmarks.timings import first_token
from paged_sdk import GgufModelBuilder, Model

__all__ = ["main"]

NUM_LONG = 2
INTERVAL = 1.0  # seconds from one short request to the next


@frozen
class First:
    """Holds the time of a first token after its request."""

    steps: int
    seconds: float


async def wait_for_first(model: Model, prompt: list[int]) -> First:
    """Stream one token."""
    steps = model.stats().steps
    seconds = await first_token(model, prompt)
    return First(model.stats().steps - steps, seconds)


async def long_prompts(model: Model, prompts: list[list[int]]) -> float:
    """Answer long prompts concurrently with one token each, and return the seconds that it takes."""
    start = time.perf_counter()
    await asyncio.gather(*(first_token(model, prompt) for prompt in prompts))
    return time.perf_counter() - start


async def measure(model: Model, *, num_long: int, num_short: int, rounds: int) -> None:
    """Measure and print the table."""
    rng = random.Random(5)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(1000, 20000) for _ in range(length)]

    idle = [await wait_for_first(model, prompt(num_short)) for _ in range(5)]
    alone: list[float] = []
    beside: list[float] = []
    waits: list[First] = []
    for _ in range(rounds):
        alone.append(await long_prompts(model, [prompt(num_long) for _ in range(NUM_LONG)]))
        async with asyncio.TaskGroup() as group:
            under_way = group.create_task(long_prompts(model, [prompt(num_long) for _ in range(NUM_LONG)]))
            await asyncio.sleep(INTERVAL)
            while not under_way.done():
                wait = await wait_for_first(model, prompt(num_short))
                if not under_way.done():
                    waits.append(wait)
                await asyncio.sleep(INTERVAL)
        beside.append(under_way.result())
    ratio = median(after / before for before, after in zip(alone, beside, strict=True))
    seconds, steps = [each.seconds for each in waits], [each.steps for each in waits]
    print(f"first token of {num_short} tokens, idle: {median(each.seconds for each in idle):.3f} s")
    print(f"  beside {NUM_LONG} prompts of {num_long} tokens, {len(waits)} requests:", end=" ")
    print(f"median {median(seconds):.2f} s, {median(steps)} steps;", end=" ")
    print(f"longest {max(seconds):.2f} s, {max(steps)} steps")
    print(f"long prompts: {median(alone):.1f} s by themselves, {median(beside):.1f} s beside the short: x{ratio:.3f}")


async def run(arguments: argparse.Namespace) -> None:
    """Load the model and measure."""
    path = model_path(arguments.model)
    async with GgufModelBuilder(str(path.parent), [path.name]).with_prefix_cache_n(None).build() as model:
        await measure(model, num_long=arguments.long, num_short=arguments.short, rounds=arguments.rounds)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2")
    parser.add_argument("--long", type=int, default=8000, help="tokens of a long prompt (default 8000)")
    parser.add_argument("--short", type=int, default=30, help="tokens of a short prompt (default 30)")
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

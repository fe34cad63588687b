"""Measure what the prefix cache's directory gains and costs.

python -m benchmarks.prefix_cache_dir [--model PATH] [--tokens 1000,4000] [--rounds 5]

Gain: time to the first token of a prompt that is computed, that a new process reads from the directory (its files in
the system's page cache, as after a restart of a service), and that the pool still has. Cost: prompt tokens per second
of prompts that are not stored yet, with and without a directory, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from paged_sdk import GgufModelBuilder, Model, SamplingParams, embedded_model_path

ONE_TOKEN = SamplingParams(temperature=0, max_len=1, ignore_eos=True)


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1000, 20000) for _ in range(length)]


def size_of(directory: Path) -> int:
    """Return the bytes of a directory's files of blocks."""
    return sum(path.stat().st_size for path in directory.rglob("*.kv"))


async def first_token(model: Model, token_ids: Sequence[int]) -> tuple[float, int]:
    """Return the milliseconds to the first token, and how many tokens were cached."""
    start = time.perf_counter()
    response = await model.send_completion_request(list(token_ids), sampling=ONE_TOKEN)
    return (time.perf_counter() - start) * 1000, response.usage.prompt_tokens_details.cached_tokens


async def gain(builder: GgufModelBuilder, directory: Path, lengths: Sequence[int], rounds: int) -> None:
    """Print the time to the first token, computed, read and from the pool."""
    for length in lengths:
        cold: list[float] = []
        read: list[float] = []
        warm: list[float] = []
        for number in range(rounds):
            shutil.rmtree(directory, ignore_errors=True)
            token_ids = prompt(number, length)
            async with builder.with_prefix_cache_dir(directory).build() as model:
                await first_token(model, prompt(-1, 40))
                cold.append((await first_token(model, token_ids))[0])
            async with builder.with_prefix_cache_dir(directory).build() as model:
                await first_token(model, prompt(-2, 40))
                took, cached = await first_token(model, token_ids)
                assert cached >= length - 33, cached
                read.append(took)
                warm.append((await first_token(model, token_ids))[0])
        num_bytes = size_of(directory)
        medians = [statistics.median(each) for each in (cold, read, warm)]
        print(
            f"{length} tokens, {num_bytes / 2**20:.0f} MiB: computed {medians[0]:.0f} ms, read {medians[1]:.1f} ms, "
            f"from the pool {medians[2]:.1f} ms; read {medians[0] / medians[1]:.1f} times as fast",
            flush=True,
        )


async def cost(builder: GgufModelBuilder, directory: Path, length: int, rounds: int) -> None:
    """Print the rates of new prompts with a directory relative to those without."""
    ratios: list[float] = []
    async with builder.build() as without, builder.with_prefix_cache_dir(directory).build() as storing:
        for number in range(rounds * 4):
            times = {}
            for model in (without, storing) if number % 2 else (storing, without):
                times[model] = (await first_token(model, prompt(1000 + number, length)))[0]
                await asyncio.sleep(0.5)  # for the last blocks to be written
            ratios.append(times[without] / times[storing])
    quartiles = statistics.quantiles(ratios, n=4)
    print(
        f"new prompts of {length} tokens while they are stored: {quartiles[1]:.3f} of the speed without a directory "
        f"(quartiles {quartiles[0]:.3f} and {quartiles[2]:.3f})",
        flush=True,
    )


def main() -> None:
    """Run the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file; default: the embedded model")
    parser.add_argument("--tokens", default="1000,4000", help="lengths of prompts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="a directory for the files; default: a temporary one")
    options = parser.parse_args()
    builder = GgufModelBuilder(options.model or embedded_model_path())
    lengths = [int(each) for each in options.tokens.split(",")]
    with TemporaryDirectory(dir=options.directory) as temporary:
        directory = Path(temporary) / "prefixes"
        asyncio.run(gain(builder, directory, lengths, options.rounds))
        asyncio.run(cost(builder, directory, lengths[0], options.rounds))


if __name__ == "__main__":
    main()

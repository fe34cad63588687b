"""Measure the cost of running a model through transformers' class, against this engine's native decoder.

python -m benchmarks.door_cost --streams 16

The model has Qwen2.5-1.5B's shape and random weights, in bfloat16; writing it takes a minute and 3.5 GB of the cache.
It is loaded twice, which takes 7 GB. Rounds of the two alternate.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final
from unittest.mock import patch

import typer
from rich.console import Console

from benchmarks.paths import cache_directory
from benchmarks.timings import tokens_per_second
from paged_sdk import TextModelBuilder

__all__ = ["main"]

_VOCAB_SIZE: Final = 151_936
_PROMPT: Final = 16


def _write(directory: Path, num_layers: int) -> None:
    """Write the model, unless it exists."""
    if (directory / "tokenizer.json").exists():
        return
    import tokenizers
    import torch
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=_VOCAB_SIZE,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    maker: Any = transformers.AutoModelForCausalLM
    maker.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    words = {f"w{index}": index for index in range(_VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w0"}))
    tokenizer.save(str(directory / "tokenizer.json"))


async def _measure(directory: Path, streams: int, length: int, rounds: int) -> None:
    console, draw = Console(), random.Random(time.perf_counter_ns())
    builder = TextModelBuilder(directory).with_dtype("bfloat16").with_max_model_len(1024)
    async with builder.build() as native:
        with patch("paged_sdk.models.any_model.has_family", return_value=False):
            through = await builder.build()
        async with through:
            speeds: dict[str, list[float]] = {"own decoder": [], "through transformers": []}
            for number in range(rounds + 1):
                for name, model in zip(speeds, (native, through), strict=True):
                    prompts = [draw.choices(range(1, _VOCAB_SIZE), k=_PROMPT) for _ in range(streams)]
                    speed = await tokens_per_second(model, prompts, length)
                    if number:  # the first round warms up
                        speeds[name].append(speed)
                        console.print(f"{name}: {speed:.1f} tokens/s")
    own, other = (median(each) for each in speeds.values())
    console.print(f"{streams} streams: {own:.1f} and {other:.1f} tokens/s: {1 - other / own:.1%} less")


def main(
    streams: Annotated[int, typer.Option(min=1, help="How many texts run at once")] = 16,
    layers: Annotated[int, typer.Option(min=1, help="How many layers the model has")] = 28,
    length: Annotated[int, typer.Option(min=8, help="Tokens of each text")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds of each")] = 5,
) -> None:
    """Print tokens per second, and what share of them the class costs."""
    directory = cache_directory(f"qwen2-1.5b-{layers}-layers-random")
    _write(directory, layers)
    asyncio.run(_measure(directory, streams, length, rounds))


if __name__ == "__main__":
    typer.run(main)

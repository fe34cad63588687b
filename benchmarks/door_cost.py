"""Measure the cost of running a model through transformers' class, against this engine's native decoder.

python -m benchmarks.door_cost --streams 16
python -m benchmarks.door_cost --shape deepseek-v2-lite --isq Q4K --streams 1 --prompt 4000

The models have random weights, in bfloat16; writing one takes up to a minute and 3.5 GB of the cache. It is loaded
twice, which takes twice its memory. Rounds of the two alternate.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Annotated, Any, Final
from unittest.mock import patch

import typer
from rich.console import Console

from benchmarks.paths import cache_directory
from benchmarks.timings import first_token, tokens_per_second
from paged_sdk import IsqType, TextModelBuilder

__all__ = ["SHAPES", "main"]

SHAPES: Final[MappingProxyType[str, dict[str, Any]]] = MappingProxyType(
    {
        "qwen2.5-1.5b": {
            "model_type": "qwen2",
            "vocab_size": 151_936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
        "qwen3-30b-a3b": {  # 2 of 48 layers
            "model_type": "qwen3_moe",
            "vocab_size": 32_000,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
        "deepseek-v2-lite": {  # 6 of 27 layers, all with dense MLPs, to compare attention
            "model_type": "deepseek_v2",
            "vocab_size": 32_000,
            "hidden_size": 2048,
            "intermediate_size": 2816,
            "num_hidden_layers": 6,
            "first_k_dense_replace": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "max_position_embeddings": 16_384,
            "tie_word_embeddings": True,
        },
    }
)


def _write(directory: Path, config: dict[str, Any]) -> None:
    """Write the model, unless it exists."""
    if (directory / "tokenizer.json").exists():
        return
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(0)
    maker: Any = transformers.AutoModelForCausalLM
    made = maker.from_config(transformers.AutoConfig.for_model(**config), dtype=torch.bfloat16)
    made.save_pretrained(directory)
    words = {f"w{index}": index for index in range(config["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w0"}))
    tokenizer.save(str(directory / "tokenizer.json"))


async def _measure(
    directory: Path, isq: IsqType | None, *, vocab_size: int, streams: int, prompt: int, length: int, rounds: int
) -> None:
    console, draw = Console(), random.Random(time.perf_counter_ns())

    def new_prompt() -> list[int]:
        return draw.choices(range(1, vocab_size), k=prompt)

    builder = TextModelBuilder(directory).with_dtype("bfloat16").with_max_model_len(prompt + length + 1024)
    builder = builder if isq is None else builder.with_isq(isq)
    async with builder.build() as native:
        with patch("paged_sdk.models.any_model.has_family", return_value=False):
            through = await builder.build()
        async with through:
            speeds: dict[str, list[float]] = {"own decoder": [], "through transformers": []}
            waits: dict[str, list[float]] = {name: [] for name in speeds}
            for number in range(rounds + 1):
                for name, model in zip(speeds, (native, through), strict=True):
                    wait = await first_token(model, new_prompt())
                    speed = await tokens_per_second(model, [new_prompt() for _ in range(streams)], length)
                    if number:  # the first round warms up
                        speeds[name].append(speed)
                        waits[name].append(wait)
                        console.print(f"{name}: {speed:.1f} tokens/s, first token after {wait * 1e3:.0f} ms")
    own, other = (median(each) for each in speeds.values())
    console.print(f"{streams} streams: {own:.1f} and {other:.1f} tokens/s: {1 - other / own:.1%} less")
    own, other = (median(each) for each in waits.values())
    console.print(f"first token of {prompt}: {own * 1e3:.0f} and {other * 1e3:.0f} ms: {other / own:.2f} times as long")


def main(
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "qwen2.5-1.5b",
    isq: Annotated[IsqType | None, typer.Option(help="type of the weights; by default they stay in bfloat16")] = None,
    streams: Annotated[int, typer.Option(min=1, help="How many texts run at once")] = 16,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt")] = 16,
    length: Annotated[int, typer.Option(min=8, help="Tokens of each text")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds of each")] = 5,
) -> None:
    """Print tokens per second and the time to the first token, and what the class costs."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"{shape!r} is not one of {', '.join(SHAPES)}")
    config = SHAPES[shape]
    directory = cache_directory(f"{shape}-layers-random")
    _write(directory, config)
    measured = _measure(
        directory,
        isq,
        vocab_size=config["vocab_size"],
        streams=streams,
        prompt=prompt,
        length=length,
        rounds=rounds,
    )
    asyncio.run(measured)


if __name__ == "__main__":
    typer.run(main)

"""Measure the time to first token of the first question about an image, and of a second one about the same image.

python -m benchmarks.repeated_image

The model has Qwen2-VL-2B's shape and random weights, in bfloat16; writing it takes a minute and 5 GB of the cache.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import numpy as np
import typer
from rich.console import Console

from benchmarks.paths import cache_directory
from benchmarks.timings import first_token_about
from paged_sdk import VisionModelBuilder

__all__ = ["main", "write_model"]

_MARKS: Final = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
_QUESTIONS: Final = ("What is this?", "Which colors are there?", "How many squares do you see?", "Is it a photograph?")


def write_model(directory: Path) -> None:
    """Write the model, unless it exists."""
    if (directory / "tokenizer.json").exists():
        return
    import tokenizers
    import torch
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=list(_MARKS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_QUESTIONS, trainer)
    config = transformers.Qwen2VLConfig(
        text_config={
            "vocab_size": 151_936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        vision_config={"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16, "patch_size": 14},
        image_token_id=_MARKS.index("<|image_pad|>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    maker: Any = transformers.AutoModelForImageTextToText
    maker.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    processor: Any = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil()
    processor.save_pretrained(directory)
    settings = {"eos_token": "<|im_end|>", "chat_template": _TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer.save(str(directory / "tokenizer.json"))


async def _measure(directory: Path, side: int, rounds: int) -> None:
    console, draw = Console(), np.random.default_rng(0)
    first: list[float] = []
    again: list[float] = []
    async with VisionModelBuilder(directory).with_logging().build() as model:
        await first_token_about(model, draw.integers(0, 256, (side, side, 3), np.uint8), _QUESTIONS[0])
        for _ in range(rounds):
            image = draw.integers(0, 256, (side, side, 3), np.uint8)
            seconds, _ = await first_token_about(model, image, _QUESTIONS[0])
            first.append(seconds)
            for question in _QUESTIONS[1:]:
                seconds, usage = await first_token_about(model, image, question)
                again.append(seconds)
                cached = usage.prompt_tokens_details.cached_tokens
                console.print(
                    f"{usage.prompt_tokens} tokens, {cached} cached: {seconds:.3f} s, {first[-1]:.3f} s the first time"
                )
    share = median(again) / median(first)
    console.print(f"{side} x {side} pixels: {median(first):.3f} s, then {median(again):.3f} s ({share:.1%})")


def main(
    side: Annotated[int, typer.Option(min=56, help="Pixels in height and in width")] = 448,
    rounds: Annotated[int, typer.Option(min=1, help="How many images")] = 3,
) -> None:
    """Print the seconds to the first token."""
    directory = cache_directory("qwen2-vl-2b-random")
    write_model(directory)
    asyncio.run(_measure(directory, side, rounds))


if __name__ == "__main__":
    typer.run(main)

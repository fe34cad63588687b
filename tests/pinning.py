"""Build tiny models on small pools, fill these with other prompts, and see what of a chat is still there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import anyio

from paged_sdk import (
    MemoryGpuConfig,
    Model,
    PagedAttentionMeta,
    PagedCacheType,
    RequestBuilder,
    SamplingParams,
    TextModelBuilder,
)

__all__ = ["BLOCK", "MESSAGES", "SYSTEM", "answer", "asked", "cached", "fill", "pooled"]

BLOCK: Final = 4
SYSTEM: Final = (
    "the first of them is a village of farmers, and the second one on the sea is a village of fishermen " * 2
)
MESSAGES: Final = ({"role": "system", "content": SYSTEM},)
SHORT: Final = SamplingParams(temperature=0.0, max_len=6, ignore_eos=True)


def pooled(
    directory: Path, *, tokens: int = 640, cache_type: PagedCacheType = PagedCacheType.AUTO, longest: int = 256
) -> TextModelBuilder:
    """Return the builder of a model with room for so many tokens."""
    pool = PagedAttentionMeta(block_size=BLOCK, gpu_memory=MemoryGpuConfig.ContextSize(tokens), cache_type=cache_type)
    builder = TextModelBuilder(directory).with_dtype("float32").with_force_cpu().with_num_threads(1)
    return builder.with_paged_attn(pool).with_max_model_len(longest)


def asked(question: str = "Which one?", *, system: str = SYSTEM, **options: Any) -> RequestBuilder:
    """Return a chat that goes on from the system prompt.

    :param options: what the builder's ``with_NAME`` take
    """
    request = RequestBuilder().add_message("system", system).add_message("user", question).with_sampling(SHORT)
    for name, value in options.items():
        request = getattr(request, f"with_{name}")(value)
    return request


async def answer(model: Model, request: RequestBuilder | None = None) -> tuple[str, int]:
    """Return an answer, and how many tokens of its prompt were cached."""
    response = await model.send_chat_request(asked() if request is None else request)
    return response.choices[0].message.content, response.usage.prompt_tokens_details.cached_tokens


async def cached(model: Model, request: RequestBuilder | None = None) -> int:
    return (await answer(model, request))[1]


async def fill(model: Model, *, seed: int = 0, num_prompts: int = 12) -> None:
    """Compute other prompts at once, twice as many tokens as the pool holds."""
    numbers = random.Random(seed)
    length = 2 * model.config.num_blocks * model.config.block_size // num_prompts
    async with anyio.create_task_group() as tasks:
        for _ in range(num_prompts):
            prompt = [numbers.randrange(5, 500) for _ in range(min(length, model.max_sequence_length - 8))]
            tasks.start_soon(model.send_completion_request, prompt, SHORT)

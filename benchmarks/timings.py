"""Time what benchmarks of one model in this process have in common: first tokens, and many texts at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from paged_sdk import Model, RequestBuilder, SamplingParams, Usage, VisionMessages

__all__ = ["first_token", "first_token_about", "tokens_per_second"]


async def first_token(model: Model, prompt: list[int]) -> float:
    """Return the seconds to a prompt's first token."""
    start = time.perf_counter()
    async with model.stream_completion_request(prompt, sampling=SamplingParams(max_len=1, ignore_eos=True)) as stream:
        async for _ in stream:
            break
        return time.perf_counter() - start


async def first_token_about(model: Model, image: Any, question: str) -> tuple[float, Usage]:
    """Return the seconds to the first token about an image, and the request's usage."""
    messages = VisionMessages().add_image_message("user", question, image)
    request = RequestBuilder.from_messages(messages).with_sampling(SamplingParams(temperature=0.0, max_len=1))
    start = time.perf_counter()
    usage = (await model.send_chat_request(request)).usage
    return time.perf_counter() - start, usage


async def tokens_per_second(
    model: Model, prompts: Sequence[list[int]], length: int, adapters: Sequence[str | None] | None = None
) -> float:
    """Return the total tokens per second while a text of each prompt is generated.

    :param length: tokens of each text
    :param adapters: the adapter of each text; None: no text has one
    """
    sampling = SamplingParams(temperature=0.0, max_len=length, ignore_eos=True)
    times: list[float] = []

    async def one(prompt: list[int], adapter: str | None) -> None:
        async with model.stream_completion_request(prompt, sampling, adapter=adapter) as stream:
            times.extend([time.perf_counter() async for _ in stream])

    names = [None] * len(prompts) if adapters is None else adapters
    await asyncio.gather(*(one(prompt, name) for prompt, name in zip(prompts, names, strict=True)))
    # Exclude prefill at the start, and the end, when texts finish one by one.
    times.sort()
    first, last = len(times) // 4, len(times) * 3 // 4
    return (last - first) / (times[last] - times[first])

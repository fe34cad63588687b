"""In dense float32 and float64 a text does not depend on how it was computed."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import pytest

import tiny
from arrivals import wait_for_requests
from paged_sdk import MemoryGpuConfig, Model, PagedAttentionMeta, SamplingParams, TextModelBuilder

pytestmark = pytest.mark.anyio

NUM_TOKENS = 40


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def prompts() -> list[list[int]]:
    """Return two dozen prompts of 1 to 120 tokens; half of them share a beginning."""
    rng = random.Random(5)
    prefix = [rng.randrange(5, 500) for _ in range(64)]
    lengths = [1, 2, 7, 8, 9, 31, 32, 33, 64, 65, 100, 120]
    alone = [[rng.randrange(5, 500) for _ in range(length)] for length in lengths]
    shared = [prefix + [rng.randrange(5, 500) for _ in range(length % 40 + 1)] for length in lengths]
    return alone + shared


def pool(tokens: int, block_size: int = 8) -> PagedAttentionMeta:
    return PagedAttentionMeta(block_size=block_size, gpu_memory=MemoryGpuConfig.ContextSize(tokens))


async def texts(model: Model, *, together: bool) -> list[str]:
    """Return the greedy texts of all prompts, one after the other or all at once."""
    sampling = SamplingParams(temperature=0, max_len=NUM_TOKENS, ignore_eos=True)
    results: dict[int, str] = {}

    async def send(index: int, prompt: list[int]) -> None:
        results[index] = (await model.send_completion_request(prompt, sampling)).choices[0].text

    if together:
        wait_for_requests(model, len(prompts()))
        async with anyio.create_task_group() as tasks:
            for index, prompt in enumerate(prompts()):
                tasks.start_soon(send, index, prompt)
    else:
        for index, prompt in enumerate(prompts()):
            await send(index, prompt)
    return [results[index] for index in range(len(results))]


FAMILIES = ("llama", "gemma2", "gemma3_text")
SHORT = [("llama", "float32", 20), ("gemma2", "float32", 20)]
LONG = [(family, dtype, 200) for family in FAMILIES for dtype in ("float32", "float64")]


@pytest.mark.parametrize(
    ("family", "dtype", "num_preemptions"), [*SHORT, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)]
)
async def test_the_same_text_however_it_is_computed(
    family: str, dtype: str, num_preemptions: int, tmp_path: Path
) -> None:
    checkpoint = tiny.make_checkpoint(family, tmp_path)
    builder = TextModelBuilder(checkpoint).with_dtype(dtype).with_force_cpu().with_num_threads(1)

    plain = builder.with_paged_attn(pool(4096)).with_prefix_cache_n(0).with_max_num_batched_tokens(4096)
    async with plain.build() as model:
        expected = await texts(model, together=False)
        assert await texts(model, together=True) == expected, "batched"
        assert model.stats().prefix_hits == 0

    async with builder.with_paged_attn(pool(4096, 16)).with_max_num_batched_tokens(11).build() as model:
        assert await texts(model, together=True) == expected, "chunked"
        hits = model.stats().prefix_hits
        assert await texts(model, together=False) == expected, "prefix hits"
        assert model.stats().prefix_hits > hits

    async with builder.with_paged_attn(pool(184)).with_max_num_seqs(64).build() as model:
        preemptions = 0
        while preemptions < num_preemptions:
            assert await texts(model, together=True) == expected, "preempted"
            assert model.stats().preemptions > preemptions
            preemptions = model.stats().preemptions

    async with builder.without_paged_attn().build() as model:
        assert await texts(model, together=False) == expected, "contiguous"
        assert await texts(model, together=True) == expected, "contiguous, with kept sequences"
        assert model.stats().prefix_hits > 0


async def test_a_seed_decides_whatever_else_is_in_the_batch(builder: TextModelBuilder) -> None:
    sampling = SamplingParams(temperature=1.3, top_k=50, top_p=0.9, seed=42, max_len=NUM_TOKENS, ignore_eos=True)
    results: list[str] = []

    async def send(model: Model, params: SamplingParams, prompt: list[int], keep: bool) -> None:
        text = (await model.send_completion_request(prompt, params)).choices[0].text
        if keep:
            results.append(text)

    for meta in (pool(4096), pool(112)):
        async with builder.with_paged_attn(meta).build() as model:
            await send(model, sampling, [3, 4, 5], keep=True)
            async with anyio.create_task_group() as tasks:
                for index in range(8):
                    other = SamplingParams(temperature=0.5 + index, seed=index, max_len=60, ignore_eos=True)
                    tasks.start_soon(send, model, other, [index, 9], False)
                    tasks.start_soon(send, model, sampling, [3, 4, 5], True)
    assert len(results) == 18
    assert len(set(results)) == 1

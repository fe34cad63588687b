"""LongRoPE rotates texts within the trained context otherwise than longer ones: each text is what transformers makes of
it, also where it outgrows the trained context, whatever runs beside it and whatever the cache holds.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
import torch

import tiny
from paged_sdk import MemoryGpuConfig, Model, PagedAttentionMeta, PagedCacheType, SamplingParams, TextModelBuilder

pytestmark = pytest.mark.anyio

TRAINED: Final = 64
NUM_TOKENS: Final = 30
CONFIG: Final[dict[str, Any]] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0],
    },
    "original_max_position_embeddings": TRAINED,
    "max_position_embeddings": 512,
}
LENGTHS: Final = (10, 40, 50, TRAINED - 1, TRAINED, TRAINED + 1, 100)
PROMPTS: Final = [[(31 * i + 7 * i * i) % 500 for i in range(length)] for length in LENGTHS]
"""Holds prompts that are prefixes of one another, so that each could hit the KV of another, in the wrong form too."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint("phi3", tmp_path_factory.mktemp("longrope"), **CONFIG)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return what transformers says to each prompt, the whole text computed anew for each token."""
    reference: Any = tiny.build_model("phi3", **CONFIG)
    texts = [list(prompt) for prompt in PROMPTS]
    with torch.inference_mode():
        for text in texts:
            for _ in range(NUM_TOKENS):
                text.append(int(reference(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return [text[length:] for text, length in zip(texts, LENGTHS, strict=True)]


async def continuation(model: Model, prompt: list[int]) -> list[int]:
    sampling = SamplingParams(temperature=0, max_len=NUM_TOKENS, ignore_eos=True, top_n_logprobs=0)
    logprobs = (await model.send_completion_request(prompt, sampling)).choices[0].logprobs
    assert logprobs is not None
    return [token.token_id for token in logprobs.content]


async def all_at_once(model: Model, prompts: list[list[int]]) -> list[list[int]]:
    results: dict[int, list[int]] = {}

    async def send(index: int) -> None:
        results[index] = await continuation(model, prompts[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(prompts)):
            tasks.start_soon(send, index)
    return [results[index] for index in range(len(prompts))]


def test_transformers_computes_everything_anew_where_a_text_outgrows_the_trained_context(
    expected: list[list[int]],
) -> None:
    """So a text is the same with its cache, as users run it."""
    reference: Any = tiny.build_model("phi3", **CONFIG)
    for prompt, text in zip(PROMPTS, expected, strict=True):
        generated = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
        # Its end tokens are suppressed, ours are not: compare up to the first.
        end = next((i for i, token in enumerate(text) if token in (0, 2)), NUM_TOKENS)
        assert generated[0, len(prompt) : len(prompt) + end].tolist() == text[:end]


@pytest.mark.parametrize("way", ["paged", "chunked", "short of memory", "contiguous", "one operation at a time"])
async def test_texts_are_those_of_transformers(way: str, checkpoint: Path, expected: list[list[int]]) -> None:
    builder = TextModelBuilder(checkpoint).with_force_cpu().with_dtype("float32")
    blocks = PagedAttentionMeta(block_size=16, gpu_memory=MemoryGpuConfig.ContextSize(2000))
    match way:
        case "paged":
            builder = builder.with_paged_attn(lambda: blocks)
        case "chunked":
            builder = builder.with_paged_attn(lambda: blocks).with_max_num_batched_tokens(24)
        case "short of memory":
            few = PagedAttentionMeta(block_size=16, gpu_memory=MemoryGpuConfig.ContextSize(200))
            builder = builder.with_paged_attn(lambda: few).with_max_num_batched_tokens(48)
        case "contiguous":
            builder = builder.without_paged_attn()
        case _:
            builder = builder.with_paged_attn(lambda: blocks).with_dtype("float64")
    async with builder.build() as model:
        assert await all_at_once(model, PROMPTS) == expected
        assert await all_at_once(model, PROMPTS) == expected, "from the prefix cache"
        assert [await continuation(model, prompt) for prompt in PROMPTS] == expected, "one by one"
        assert model.stats().prefix_hits > 0


async def test_choices_outgrow_the_trained_context_each_on_its_own(checkpoint: Path, expected: list[list[int]]) -> None:
    sampling = SamplingParams(temperature=0, n_choices=3, max_len=NUM_TOKENS, ignore_eos=True, top_n_logprobs=0)
    async with TextModelBuilder(checkpoint).with_force_cpu().with_dtype("float32").build() as model:
        for prompt, text in zip(PROMPTS, expected, strict=True):
            response = await model.send_completion_request(prompt, sampling)
            for choice in response.choices:
                assert choice.logprobs is not None
                assert [token.token_id for token in choice.logprobs.content] == text


def first_logprobs(**changes: Any) -> list[torch.Tensor]:
    """Return transformers' logprobs of the token after each prompt."""
    reference: Any = tiny.build_model("phi3", **CONFIG | changes)
    with torch.inference_mode():
        return [reference(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for prompt in PROMPTS]


async def test_eight_bit_keys_and_values_too(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are less exact, but far nearer to the text's own form than to the other; of 10 tokens both are alike. No
    measured keys are subtracted, as long texts rotate theirs in another way.
    """
    caplog.set_level(logging.INFO, logger="paged_sdk")
    factors = CONFIG["rope_parameters"]
    swapped = factors | {"short_factor": factors["long_factor"], "long_factor": factors["short_factor"]}
    expected, others = first_logprobs(), first_logprobs(rope_parameters=swapped)
    meta = PagedAttentionMeta(block_size=16, cache_type=PagedCacheType.F8E4M3)
    builder = TextModelBuilder(checkpoint).with_force_cpu().with_dtype("float32").with_paged_attn(lambda: meta)
    sampling = SamplingParams(temperature=0, max_len=1, ignore_eos=True, top_n_logprobs=20)
    ratios: dict[int, float] = {}

    async def compare(index: int) -> None:
        logprobs = (await model.send_completion_request(PROMPTS[index], sampling)).choices[0].logprobs
        assert logprobs is not None
        likeliest = logprobs.content[0].top_logprobs
        tokens = torch.tensor([each.token_id for each in likeliest])
        own = torch.tensor([each.logprob for each in likeliest])
        error, distance = (float((own - form[index][tokens]).norm()) for form in (expected, others))
        ratios[LENGTHS[index]] = error / distance

    async with builder.build() as model, anyio.create_task_group() as tasks:
        for index in range(len(PROMPTS)):
            tasks.start_soon(compare, index)
    assert max(ratio for length, ratio in ratios.items() if length >= 40) < 0.25, ratios  # measured: at most 0.12
    assert ratios[10] < 1
    assert "KV" in caplog.text
    assert "Keys measured" not in caplog.text

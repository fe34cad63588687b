"""Prompts whose last tokens are chosen anew, on whole models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from arrivals import wait_for_requests
from paged_sdk import (
    CompletionResponse,
    GgufModelBuilder,
    MemoryGpuConfig,
    Model,
    PagedAttentionMeta,
    SamplingParams,
    SpeculativeConfig,
    TextModelBuilder,
)

NATURAL = ["The capital of France is", "Once upon a time", "One, two, three, four,", "The sun rises in the"]
GREEDY = SamplingParams(temperature=0, max_len=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, seed=4, max_len=24, ignore_eos=True, n_choices=3)


@pytest.mark.smollm2
def test_a_real_model_goes_on_as_in_a_whole_text(smollm2: Path) -> None:
    """Where a prompt ends with a whole word it makes no difference, amid one it does."""
    broken = 'The page is at <a href="http:'

    async def run(builder: GgufModelBuilder) -> list[str]:
        # One arithmetic for the prompt's last token and for a generated one in its place: no near tie decides.
        async with builder.with_force_cpu().with_batch_invariance().build() as model:
            answers = await model.send_completion_request([*NATURAL, broken, "I am very happ"], GREEDY)
            return [choice.text for choice in answers.choices]

    *plain, plain_link, plain_word = asyncio.run(run(GgufModelBuilder(smollm2)))
    *healed, link, word = asyncio.run(run(GgufModelBuilder(smollm2).with_token_healing()))
    assert healed == plain
    assert link.startswith("//")
    assert word.startswith("y")
    assert (plain_link, plain_word) != (link, word)


async def answers(model: Model, prompts: list[str], sampling: SamplingParams) -> list[str]:
    response = await model.send_completion_request(prompts, sampling)
    return [choice.text for choice in response.choices]


PROMPTS = ["The quick brown", "fox jum", "over the la"]


@pytest.mark.parametrize("sampling", [evolve(GREEDY, max_len=24), DRAWN, evolve(DRAWN, stop=["a", "e"])])
def test_texts_are_the_same_whatever_else_is_on(builder: TextModelBuilder, sampling: SamplingParams) -> None:
    healing = builder.with_token_healing()

    async def run(own: TextModelBuilder) -> tuple[list[str], int]:
        async with own.build() as model:
            wait_for_requests(model, len(PROMPTS))
            return await answers(model, PROMPTS, sampling), model.stats().preemptions

    def pool(**settings: Any) -> TextModelBuilder:
        return healing.with_paged_attn(PagedAttentionMeta(block_size=4, **settings))

    expected, _ = asyncio.run(run(healing))
    assert asyncio.run(run(builder))[0] != expected
    for other in (
        healing.without_paged_attn(),
        healing.with_speculation(SpeculativeConfig(gamma=4)),
        healing.with_max_num_batched_tokens(8),
    ):
        assert asyncio.run(run(other))[0] == expected
    found, num_preemptions = asyncio.run(run(pool(gpu_memory=MemoryGpuConfig.ContextSize(64))))
    assert found == expected
    assert num_preemptions > 0 or sampling.stop  # texts that stop early leave room


@pytest.mark.anyio
async def test_what_is_taken_back_is_computed_and_not_shown(builder: TextModelBuilder) -> None:
    sampling = evolve(GREEDY, max_len=20, top_n_logprobs=0)

    async def run(own: TextModelBuilder, prompt: str) -> tuple[CompletionResponse, str, list[int]]:
        async with own.build() as model:
            response = await model.send_completion_request(prompt, sampling)
            async with model.stream_completion_request(prompt, sampling) as stream:
                streamed = "".join([choice.text async for chunk in stream for choice in chunk.choices])
            return response, streamed, await model.tokenize(prompt)

    prompt = "The quick brown"
    healed, streamed, token_ids = await run(builder.with_token_healing(), prompt)
    plain, _, _ = await run(builder, prompt)
    logprobs = healed.choices[0].logprobs
    assert logprobs is not None
    num_removed = len(token_ids) - healed.usage.prompt_tokens
    assert num_removed > 0
    assert plain.usage.prompt_tokens == len(token_ids)
    assert healed.usage.completion_tokens == plain.usage.completion_tokens + num_removed
    whole = b"".join(bytes(token.bytes or ()) for token in logprobs.content).decode("utf-8", "replace")
    assert (
        whole.removesuffix(healed.choices[0].text).encode()
        == prompt.encode()[-len(whole) + len(healed.choices[0].text) :]
    )
    assert streamed == healed.choices[0].text


@pytest.mark.anyio
async def test_chats_and_tokens_stay_as_they_are(builder: TextModelBuilder) -> None:
    token_ids = list(range(60, 75))
    texts = []
    for own in builder, builder.with_token_healing():
        async with own.build() as model:
            chat = await model.send_chat_request([{"role": "user", "content": "The quick brown"}])
            completion = await model.send_completion_request(token_ids, GREEDY)
            texts.append((chat.choices[0].message.content, completion.choices[0].text, completion.usage.prompt_tokens))
    assert texts[0] == texts[1]

"""Say under which settings layers beside a model are to draft the same, and to change no text."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from paged_sdk import (
    Constraint,
    IsqType,
    MemoryGpuConfig,
    PagedAttentionMeta,
    PagedCacheType,
    SamplingParams,
    TextModelBuilder,
)
from watched_drafts import PROMPTS, texts_of, watching, without_drafts

__all__ = [
    "DRAWN",
    "GAMMA",
    "GREEDY",
    "KINDS",
    "NUM_TOKENS",
    "SETTINGS",
    "builder_of",
    "expect_drafts",
    "expect_the_same_answers",
    "expect_the_same_texts",
    "pool",
]

NUM_TOKENS: Final = 24
GREEDY: Final = SamplingParams(temperature=0.0, max_len=NUM_TOKENS, ignore_eos=True)
DRAWN: Final = SamplingParams(temperature=0.9, seed=5, max_len=NUM_TOKENS, ignore_eos=True)
GAMMA: Final = 4
"""Most drafts at a time."""


def builder_of(path: Path) -> TextModelBuilder:
    """Return the builder of a checkpoint's model, which computes in float32."""
    return TextModelBuilder(path).with_dtype("float32").with_force_cpu().with_num_threads(1)


def pool(tokens: int, cache_type: PagedCacheType = PagedCacheType.AUTO) -> PagedAttentionMeta:
    """Return a pool of blocks of 8 tokens."""
    return PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(tokens), cache_type=cache_type)


SETTINGS: Final[Mapping[str, Any]] = {
    "default": lambda builder: builder,
    "small chunks": lambda builder: builder.with_max_num_batched_tokens(16).with_paged_attn(pool(2000)),
    "preempted": lambda builder: builder.with_max_num_batched_tokens(32).with_paged_attn(pool(136)),
    "contiguous": lambda builder: builder.without_paged_attn(),
}
"""By name, settings of models in which the four texts lose their KV if they are preempted."""
KINDS: Final[Mapping[str, Any]] = {
    "FP8": lambda builder: builder.with_paged_attn(pool(2000, PagedCacheType.F8E4M3)),
    "4 bits": lambda builder: builder.with_paged_attn(pool(2000, PagedCacheType.Q4)),
    "no prefix cache": lambda builder: builder.with_prefix_cache_n(None),
    "few texts at a time": lambda builder: builder.with_max_num_seqs(2),
    "quantized": lambda builder: builder.with_isq(IsqType.Q8_0),
    "batch invariance": lambda builder: builder.with_isq(IsqType.Q8_0).with_batch_invariance(),
}
"""Settings with which the model computes something else."""


async def expect_drafts(
    plain: Any, drafting: Any, likeliest: Callable[[list[int], list[int]], int], *, is_preempted: bool
) -> None:
    """Expect the drafts of a reference, of texts that share steps; some are right, and some are not.

    :param plain: the builder of the model without drafts
    :param drafting: the builder of the same model with them
    :param likeliest: returns the reference's next draft after a text and the drafts after it
    """
    texts, tokens = await without_drafts(plain, GREEDY)
    with watching(tokens) as watched:
        async with drafting.build() as model:
            assert await texts_of(model, GREEDY) == texts
            stats = model.stats()
    assert 0.2 < stats.accepted_tokens / stats.drafted_tokens < 1
    assert (stats.preemptions > 0) == is_preempted
    assert stats.steps < 0.8 * sum(map(len, tokens.values()))
    checked = random.Random(0).sample(watched.found, 40)
    assert {len(drafts) for _, drafts, _ in checked} == set(range(GAMMA))
    for before, drafts, token in checked:
        assert token == likeliest(before, drafts), (len(before), drafts)


async def expect_the_same_texts(plain: Any, drafting: Any) -> None:
    """Expect the texts of the model without drafts, greedy and drawn ones."""
    for sampling in (GREEDY, DRAWN):
        texts, tokens = await without_drafts(plain, sampling)
        with watching(tokens):
            async with drafting.build() as model:
                assert await texts_of(model, sampling) == texts
                stats = model.stats()
        assert 0 < stats.accepted_tokens < stats.drafted_tokens


async def expect_the_same_answers(plain: Any, drafting: Any) -> None:
    """Expect the same choices, constrained and predicted texts, and texts of an adapter named ``adapter``."""
    constraint = Constraint.regex("the (first|last|only) (one|two|three) of (them|us)")
    choices = SamplingParams(temperature=0.9, seed=3, n_choices=3, max_len=NUM_TOKENS, ignore_eos=True)

    async def answers(builder: Any) -> list[str]:
        async with builder.build() as model:
            first = await model.send_completion_request(PROMPTS[0], GREEDY)
            got = [
                first,
                await model.send_completion_request(PROMPTS[0], choices),
                await model.send_completion_request(PROMPTS[1], DRAWN, constraint=constraint),
                await model.send_completion_request(PROMPTS[0], GREEDY, prediction=first.choices[0].text),
                await model.send_completion_request(PROMPTS[0], GREEDY, adapter="adapter"),
            ]
            return [choice.text for each in got for choice in each.choices]

    expected = await answers(plain)
    assert len(set(expected)) >= 5
    with patch("paged_sdk.scheduler.draft_account.DraftBalance.allows", True):
        assert await answers(drafting) == expected
    with watching({}) as watched:
        assert await answers(drafting) == expected
    assert len(watched.found) > 50

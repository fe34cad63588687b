"""Assistants draft what transformers' would over the same keys, and change no text."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from assistant_checkpoints import TARGETS, AssistantReference, make_assistant, make_target
from paged_sdk import (
    MemoryGpuConfig,
    PagedAttentionMeta,
    PagedCacheType,
    SamplingParams,
    SpeculativeConfig,
    TextModelBuilder,
    TextSpeculativeBuilder,
)
from watched_drafts import texts_of, tokens_of, watching

pytestmark = pytest.mark.anyio

NUM_TOKENS: Final = 24
GREEDY: Final = SamplingParams(temperature=0.0, max_len=NUM_TOKENS, ignore_eos=True)
DRAWN: Final = SamplingParams(temperature=0.9, seed=5, max_len=NUM_TOKENS, ignore_eos=True)
GAMMA: Final = 4


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=list(TARGETS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    return make_target(request.param, directory / "target"), make_assistant(request.param, directory / "assistant")


def builder_of(path: Path) -> TextModelBuilder:
    return TextModelBuilder(path).with_dtype("float32").with_force_cpu().with_num_threads(1)


def with_assistant(builder: Any, assistant: Path) -> Any:
    return TextSpeculativeBuilder(builder, TextModelBuilder(assistant), SpeculativeConfig(gamma=GAMMA))


def pool(tokens: int, cache_type: PagedCacheType = PagedCacheType.AUTO) -> PagedAttentionMeta:
    return PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(tokens), cache_type=cache_type)


SETTINGS: Final[Mapping[str, Any]] = {
    "default": lambda builder: builder,
    "small chunks": lambda builder: builder.with_max_num_batched_tokens(16).with_paged_attn(pool(2000)),
    "preempted": lambda builder: builder.with_max_num_batched_tokens(32).with_paged_attn(pool(136)),
    "contiguous": lambda builder: builder.without_paged_attn(),
}


@pytest.mark.parametrize("name", SETTINGS)
async def test_drafts_are_those_of_transformers(pair: tuple[Path, Path], name: str) -> None:
    """Of texts that share steps and lose their KV; some drafts are right, and some are not."""
    plain, reference = SETTINGS[name](builder_of(pair[0])), AssistantReference(*pair)
    tokens = await tokens_of(plain, GREEDY)
    async with plain.build() as model:
        texts = await texts_of(model, GREEDY)
    with watching(tokens) as watched:
        async with with_assistant(plain, pair[1]).build() as model:
            assert await texts_of(model, GREEDY) == texts
            stats = model.stats()
    assert 0.2 < stats.accepted_tokens / stats.drafted_tokens < 1
    assert (stats.preemptions > 0) == (name == "preempted")
    assert stats.steps < 0.8 * sum(map(len, tokens.values()))
    checked = random.Random(0).sample(watched.found, 40)
    assert {len(drafts) for _, drafts, _ in checked} == set(range(GAMMA))
    for before, drafts, token in checked:
        assert token == reference.likeliest(before, drafts), (len(before), drafts)

"""Answer a long prompt while other texts are generated."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import anyio
import pytest
from benchmarks.mixed_load import measure_round

from paged_sdk import GgufModelBuilder, PagedAttentionMeta, PagedCacheType, SamplingParams
from paged_sdk.model import Model

pytestmark = [pytest.mark.anyio, pytest.mark.smollm2]
NUM_STREAMS = 3


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def answer_beside(model: Model, prompt: list[int]) -> str:
    """Return an answer with its log-probabilities, from a prompt that comes while texts are generated."""
    answers = []

    async def read(start: int, begun: anyio.Event) -> None:
        sampling = SamplingParams(temperature=0, max_len=40, ignore_eos=True)
        async with model.stream_completion_request([start, 5, 7], sampling=sampling) as stream:
            async for _ in stream:
                begun.set()

    async with anyio.create_task_group() as tasks:
        for index in range(NUM_STREAMS):
            begun = anyio.Event()
            tasks.start_soon(read, 3 + index, begun)
            await begun.wait()
        sampling = SamplingParams(temperature=0, max_len=8, top_n_logprobs=2, ignore_eos=True)
        response = await model.send_completion_request(prompt, sampling)
        answers.append(repr(response.choices[0].logprobs))
    return answers[0]


@pytest.mark.parametrize(
    "cache_type", [PagedCacheType.AUTO, pytest.param(PagedCacheType.F8E4M3, marks=pytest.mark.long)]
)
async def test_an_answer_does_not_depend_on_how_its_prompt_was_cut(
    shallow_smollm2: Path, cache_type: PagedCacheType
) -> None:
    """To the last bit: in chunks as small as can be, in one, and from a prefix that is cached."""
    prompt = [(7 * index) % 997 + 1000 for index in range(150)]
    answers = []
    for slowdown in (1.01, 0.0):
        builder = GgufModelBuilder(shallow_smollm2).with_force_cpu().with_num_threads(1).with_max_slowdown(slowdown)
        meta = PagedAttentionMeta(block_size=16, cache_type=cache_type)
        async with builder.with_paged_attn(meta).build() as model:
            answers += [await answer_beside(model, prompt), await answer_beside(model, prompt)]
            assert model.stats().prefix_hits > 0
    assert len(set(answers)) == 1


@pytest.mark.timing
@pytest.mark.timeout(600)
async def test_streams_and_a_long_prompt_hardly_hold_each_other_up(smollm2: Path) -> None:
    numbers = iter(range(1000, 10**6))

    def make_prompt(length: int) -> list[int]:
        first = next(numbers)
        return [(first * 31 + 7 * index) % 20000 + 1000 for index in range(length)]

    async with GgufModelBuilder(smollm2).with_force_cpu().with_prefix_cache_n(None).build() as model:
        rounds = [
            await measure_round(model, make_prompt, num_streams=8, num_prompt=2000, seconds=1.0) for _ in range(5)
        ]
    # With steps of the whole budget they are 48 and 1.0, and 3 and 1.5 if a chunk cost nothing for itself.
    assert median(each.slower_tokens for each in rounds) < 5
    assert median(each.later_first for each in rounds) < 2.2

"""Models some of whose layers are an MLP or experts alone, while none is recurrent, behind the public names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM

from far_device import let_choose_far
from native_weights import needs_library
from paged_sdk import (
    ConfigError,
    IsqType,
    LayerTopology,
    MemoryGpuConfig,
    PagedAttentionMeta,
    SamplingParams,
    SpeculativeConfig,
    TextModelBuilder,
    Topology,
)
from tiny import make_other_checkpoint

pytestmark = pytest.mark.anyio

PROMPTS: Final = ([5, 6, 7, 8] * 6, [9] * 70, list(range(100, 133)))
NUM_TOKENS: Final = 16
GREEDY: Final = SamplingParams(temperature=0.0, max_len=NUM_TOKENS, ignore_eos=True)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_other_checkpoint(
        "nemotron_h",
        tmp_path_factory.mktemp("nemotron_h"),
        layers_block_type=["moe", "full_attention", "mlp", "full_attention", "mlp"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    )


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    reference: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return [
        reference.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def builder_of(path: Path) -> TextModelBuilder:
    builder = TextModelBuilder(path).with_dtype("float32").with_force_cpu().with_num_threads(1)
    return builder.with_paged_attn(pool(2000))


def pool(tokens: int) -> PagedAttentionMeta:
    return PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(tokens))


async def check_texts(builder: TextModelBuilder, expected: list[list[int]]) -> int:
    """Check the texts of all prompts.

    :returns: the number of tokens whose KV was found
    """
    async with builder.build() as model:
        got = await asyncio.gather(*(model.send_completion_request(prompt, GREEDY) for prompt in PROMPTS))
        for response, tokens in zip(got, expected, strict=True):
            assert response.choices[0].text == await model.detokenize(tokens)
        return sum(response.usage.prompt_tokens_details.cached_tokens for response in got)


SETTINGS: Final[Mapping[str, Any]] = {
    "default": lambda builder: builder,
    "small chunks": lambda builder: builder.with_max_num_batched_tokens(16),
    "preempted": lambda builder: builder.with_paged_attn(pool(160)),
    "contiguous": lambda builder: builder.without_paged_attn(),
    "drafts": lambda builder: builder.with_speculation(SpeculativeConfig(gamma=2)),
    "two ranks": lambda builder: builder.with_tensor_parallel(2),
}


@pytest.mark.parametrize("name", SETTINGS)
async def test_texts_are_those_of_transformers(checkpoint: Path, expected: list[list[int]], name: str) -> None:
    await check_texts(SETTINGS[name](builder_of(checkpoint)), expected)


async def test_stored_blocks_hold_the_keys_and_values(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    for cached in (0, 16 + 64 + 32):
        found = await check_texts(builder_of(checkpoint).with_prefix_cache_dir(tmp_path), expected)
        assert found == cached


async def test_they_are_on_one_device(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_choose_far(monkeypatch)
    topology = Topology.empty().with_range(range(2), LayerTopology(device="meta:0"))
    with pytest.raises(ConfigError, match="one device for nemotron_h's layers without attention"):
        await builder_of(checkpoint).with_device("cpu").with_topology(topology).build()


async def test_texts_depend_on_no_batch(checkpoint: Path, expected: list[list[int]]) -> None:
    await check_texts(builder_of(checkpoint).with_batch_invariance(), expected)


@needs_library
@pytest.mark.parametrize("mlp", ["mlp", "moe"])
async def test_ranks_say_the_same_in_native_calls(mlp: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of layers without attention, an MLP or experts say how many columns each rank has."""
    caplog.set_level("INFO", "paged_sdk")
    sizes: dict[str, Any] = {} if mlp == "mlp" else {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64, "intermediate_size": 64,
    }  # fmt: skip
    path = make_other_checkpoint(
        "nemotron_h", tmp_path, layers_block_type=[mlp, "full_attention", mlp, "full_attention"], **sizes
    )
    texts = []
    for num_ranks in (1, 2):
        async with builder_of(path).with_isq(IsqType.Q8_0).with_tensor_parallel(num_ranks).build() as model:
            got = await asyncio.gather(*(model.send_completion_request(prompt, GREEDY) for prompt in PROMPTS))
            texts.append([response.choices[0].text for response in got])
    assert texts[0] == texts[1]
    assert "one operation at a time" not in caplog.text

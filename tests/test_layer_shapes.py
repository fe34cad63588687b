"""Models whose layers differ in their heads, some of which attend over the keys of others, behind the public names:
batches, preemption, choices, prefix cache, drafts, adapters and quantization change no text.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM

from adapter_files import merge, write_adapter
from far_device import let_choose_far
from paged_sdk import (
    CompletionChoice,
    ConfigError,
    GgufModelBuilder,
    IsqType,
    LayerTopology,
    MemoryGpuConfig,
    Model,
    PagedAttentionMeta,
    PagedCacheType,
    SamplingParams,
    SpeculativeConfig,
    TextModelBuilder,
    TextSpeculativeBuilder,
    Topology,
    write_gguf,
)
from paged_sdk.build.memory_plan import plan_memory
from tiny import make_other_checkpoint

pytestmark = pytest.mark.anyio

CONFIG: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 16,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 512,
}
ELEMENTS: Final = 2 * 2 * (32 + 64 + 32 + 64)
"""Of keys and values of a token: two heads in each of the four layers that keep keys."""
PROMPTS: Final = ([5, 6, 7, 8] * 6, [40, 41, 42] * 5, [9] * 70, list(range(100, 133)))
NUM_TOKENS: Final = 16
GREEDY: Final = SamplingParams(temperature=0.0, max_len=NUM_TOKENS, ignore_eos=True, top_n_logprobs=0)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_other_checkpoint("gemma4_text", tmp_path_factory.mktemp("gemma4"), **CONFIG)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    return [continued(reference, prompt) for prompt in PROMPTS]


def continued(reference: Any, prompt: list[int]) -> list[int]:
    tokens: list[int] = reference.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None
    )[0, len(prompt) :].tolist()
    return tokens


def builder_of(path: Path) -> TextModelBuilder:
    return TextModelBuilder(path).with_dtype("float32").with_force_cpu().with_num_threads(1)


def pool(tokens: int, cache_type: PagedCacheType = PagedCacheType.AUTO) -> PagedAttentionMeta:
    return PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(tokens), cache_type=cache_type)


async def texts_of(model: Model, **options: Any) -> list[list[int]]:
    responses = await asyncio.gather(
        *(model.send_completion_request(prompt, sampling=GREEDY, **options) for prompt in PROMPTS)
    )
    return [_tokens(response.choices[0]) for response in responses]


def _tokens(choice: CompletionChoice) -> list[int]:
    assert choice.logprobs is not None
    return [token.token_id for token in choice.logprobs.content]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda builder: builder.with_paged_attn(pool(1024)).with_max_num_batched_tokens(24), id="chunks"),
        pytest.param(lambda builder: builder.without_paged_attn(), id="contiguous"),
        pytest.param(
            lambda builder: TextSpeculativeBuilder(builder, builder, SpeculativeConfig(gamma=3)),
            id="drafts of itself",
            marks=pytest.mark.long,  # random combinations draw them, too
        ),
    ],
)
async def test_texts_are_those_of_transformers(change: Any, checkpoint: Path, expected: list[list[int]]) -> None:
    async with change(builder_of(checkpoint)).build() as model:
        assert await texts_of(model) == expected
        assert await texts_of(model) == expected  # with what is cached of the first


async def test_preempted_texts_go_on(checkpoint: Path, expected: list[list[int]]) -> None:
    async with builder_of(checkpoint).with_paged_attn(pool(112)).with_max_num_seqs(4).build() as model:
        assert await texts_of(model) == expected
        assert model.stats().preemptions > 0


async def test_several_choices_share_a_prompt(checkpoint: Path, expected: list[list[int]]) -> None:
    sampling = SamplingParams(temperature=0.0, max_len=NUM_TOKENS, ignore_eos=True, n_choices=3, top_n_logprobs=0)
    async with builder_of(checkpoint).with_paged_attn(pool(1024)).build() as model:
        response = await model.send_completion_request(PROMPTS[0], sampling=sampling)
    assert [_tokens(choice) for choice in response.choices] == [expected[0]] * 3


@pytest.mark.parametrize("cache_type", [PagedCacheType.F8E4M3, pytest.param(PagedCacheType.Q4, marks=pytest.mark.long)])
async def test_quantized_keys_say_nearly_the_same(
    cache_type: PagedCacheType, checkpoint: Path, expected: list[list[int]]
) -> None:
    async with builder_of(checkpoint).with_paged_attn(pool(1024, cache_type)).build() as model:
        made = await texts_of(model)
        assert await texts_of(model) == made
    same = sum(
        own == other for text, judge in zip(made, expected, strict=True) for own, other in zip(text, judge, strict=True)
    )
    assert same > len(PROMPTS)  # a difference changes all that follows it


def test_layers_that_share_keys_take_no_room(checkpoint: Path) -> None:
    plan = plan_memory(builder_of(checkpoint).with_paged_attn(pool(1024)))
    assert plan.bytes_per_token == 4 * ELEMENTS
    plan = plan_memory(builder_of(checkpoint).with_paged_attn(pool(1024, PagedCacheType.F8E4M3)))
    assert plan.bytes_per_token == ELEMENTS + 4 * 2 * 2 * 4  # scales of keys and values, two heads, four layers


async def test_adapters_change_all_layers(checkpoint: Path, tmp_path: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    targets = ("q_proj", "k_proj", "o_proj", "down_proj", "per_layer_input_gate", "per_layer_projection")
    write_adapter(tmp_path / "adapter", reference, seed=1, targets=targets)
    merged = merge(reference, tmp_path / "adapter")
    changed = [continued(merged, prompt) for prompt in PROMPTS]
    async with builder_of(checkpoint).with_paged_attn(pool(1024)).with_adapter(tmp_path / "adapter").build() as model:
        plain = await texts_of(model)
        assert await texts_of(model, adapter="adapter") == changed != plain


async def test_requantization_replaces_the_second_table(checkpoint: Path) -> None:
    async with builder_of(checkpoint).with_isq(IsqType.Q8_0).build() as model:
        wanted = await texts_of(model)
    async with builder_of(checkpoint).build() as model:
        await model.re_isq_model(IsqType.Q8_0)
        assert await texts_of(model) == wanted


async def test_gguf_files_and_calibration(checkpoint: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 100)
    path = write_gguf(checkpoint, tmp_path / "model.gguf", type="F32", calibrate=tmp_path / "text.txt")
    async with GgufModelBuilder(tmp_path, [path.name]).with_dtype("float32").build() as model:
        assert await texts_of(model) == expected


def test_a_layer_is_where_the_keys_are_that_it_attends_over(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_choose_far(monkeypatch)
    apart = Topology.empty().with_range(range(5, 6), LayerTopology(device="meta:0"))
    with pytest.raises(ConfigError, match="one device for layers 3 and 5"):
        plan_memory(builder_of(checkpoint).with_topology(apart))


def test_ranks_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"with_tensor_parallel = 2 .* expected 1 for gemma4_text"):
        plan_memory(builder_of(checkpoint).with_tensor_parallel(2))

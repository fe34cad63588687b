"""Models with latent attention behind the public names: however their KV is kept, shared, cut and guessed, texts are
those of transformers; and what they do not go together with is refused.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from adapter_files import merge, write_adapter
from arrivals import wait_for_requests
from native_weights import needs_library
from paged_sdk import (
    AdapterError,
    CompletionResponse,
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
from paged_sdk.kernels.native.decoder import NativeDecoder
from paged_sdk.kernels.native.paged_attention import VarlenBatch
from quantized_writers import WRITERS, pack_checkpoint
from tiny import make_other_checkpoint

pytestmark = pytest.mark.anyio

LATENT: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 48,
    "v_head_dim": 16,
}
# The second's projections of latent vectors are not packed, so that its layers run one operation at a time.
CONFIGS: Final[Mapping[str, dict[str, Any]]] = {
    "youtu": LATENT,
    "deepseek_v3": LATENT
    | {
        "q_lora_rank": 24,
        "qk_nope_head_dim": 24,
        "v_head_dim": 20,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
}
# Sizes of whole blocks, so that projections can be quantized, which are wide enough that chunks are decompressed.
WIDE: Final = {"kv_lora_rank": 128, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
LONG: Final = (list(range(3, 203)), [*range(3, 103), *range(300, 380)], [5, 6, 7, 8, 9] * 30, [40, 41] * 50)
PROMPTS: Final = ([5, 6, 7, 8] * 6, [40, 41, 42] * 5, [9] * 70, list(range(100, 133)))
NUM_TOKENS: Final = 24
TARGETS: Final = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "down_proj")
GREEDY: Final = SamplingParams(temperature=0.0, max_len=NUM_TOKENS, ignore_eos=True)
SCORED: Final = SamplingParams(temperature=0.0, max_len=1, prompt_logprobs=0)


@pytest.fixture(scope="module", params=["youtu", pytest.param("deepseek_v3", marks=pytest.mark.long)])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: str = request.param
    return make_other_checkpoint(family, tmp_path_factory.mktemp(family), **CONFIGS[family])


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_other_checkpoint("youtu", tmp_path_factory.mktemp("wide"), **(CONFIGS["youtu"] | WIDE))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def builder_of(path: Path) -> TextModelBuilder:
    return TextModelBuilder(path).with_dtype("float32").with_force_cpu().with_num_threads(1)


def pool(tokens: int, cache_type: PagedCacheType = PagedCacheType.AUTO) -> PagedAttentionMeta:
    return PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(tokens), cache_type=cache_type)


def reference_of(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def continued(reference: Any, prompt: list[int]) -> list[int]:
    tokens: list[int] = reference.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None
    )[0, len(prompt) :].tolist()
    return tokens


def text_of(response: CompletionResponse) -> str:
    return response.choices[0].text


async def texts_of(model: Model) -> list[str]:
    return [text_of(await model.send_completion_request(prompt, GREEDY)) for prompt in PROMPTS]


async def prompt_logprobs(model: Model) -> torch.Tensor:
    response = await model.send_completion_request(PROMPTS[3], SCORED)
    found = response.choices[0].prompt_logprobs
    assert found is not None
    return torch.tensor([token.logprob for token in found.content])


SETTINGS: Final[Mapping[str, Any]] = {
    "default": lambda builder: builder,
    "small chunks": lambda builder: builder.with_max_num_batched_tokens(16).with_paged_attn(pool(2000)),
    "preempted": lambda builder: builder.with_max_num_batched_tokens(32).with_paged_attn(pool(160)),
    "preempted, no prefix cache": lambda builder: builder.with_paged_attn(pool(160)).with_prefix_cache_n(None),
    "contiguous": lambda builder: builder.without_paged_attn(),
    "drafts": lambda builder: builder.with_speculation(SpeculativeConfig(gamma=4)),
}


@pytest.mark.parametrize("name", SETTINGS)
async def test_texts_are_those_of_transformers(checkpoint: Path, name: str) -> None:
    reference = reference_of(checkpoint)
    expected = [continued(reference, prompt) for prompt in PROMPTS]
    async with SETTINGS[name](builder_of(checkpoint)).build() as model:
        wait_for_requests(model, len(PROMPTS))
        got = await asyncio.gather(*(model.send_completion_request(prompt, GREEDY) for prompt in PROMPTS))
        for response, tokens in zip(got, expected, strict=True):
            assert text_of(response) == await model.detokenize(tokens)
        stats = model.stats()
        assert stats.blocks_used == 0
        assert (stats.preemptions > 0) == name.startswith("preempted")


@needs_library
@pytest.mark.parametrize("budget", [512, 112])
async def test_long_prompts_are_decompressed_beside_decodes(
    wide: Path, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are cut, and whose first blocks are cached."""
    run, found = NativeDecoder.__call__, list[int]()

    def counted(
        self: NativeDecoder, hidden: Any, ropes: Any, slots: Any, batch: VarlenBatch, *rest: Any, **more: Any
    ) -> Any:
        if batch.decompressed is not None:
            found.extend(batch.context_lens[batch.decompressed.bool()].tolist())
        return run(self, hidden, ropes, slots, batch, *rest, **more)

    monkeypatch.setattr(NativeDecoder, "__call__", counted)
    reference = reference_of(wide)
    expected = [continued(reference, prompt) for prompt in LONG]
    async with builder_of(wide).with_paged_attn(pool(2000)).with_max_num_batched_tokens(budget).build() as model:
        got = [await model.send_completion_request(prompt, GREEDY) for prompt in LONG[:2]]
        assert [response.usage.prompt_tokens_details.cached_tokens for response in got] == [0, 96]
        assert found == ([200, 180] if budget == 512 else [112, 200, 180])
        got += await asyncio.gather(*(model.send_completion_request(prompt, GREEDY) for prompt in LONG[2:]))
        assert [text_of(response) for response in got] == [await model.detokenize(tokens) for tokens in expected]


@needs_library
async def test_quantized_projections(wide: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are in 8-bit blocks, as the log says and plans count, whether quantized in situ or stored so."""
    caplog.set_level(logging.INFO, "paged_sdk")
    file = write_gguf(wide, tmp_path / "model.gguf", type="Q8_0")
    builders = [builder_of(wide), builder_of(wide).with_isq(IsqType.Q4K), GgufModelBuilder(file).with_force_cpu()]
    scores = []
    for builder in builders:
        async with builder.build() as model:
            response = await model.send_completion_request(LONG[0], SCORED)
        logprobs = response.choices[0].prompt_logprobs
        assert logprobs is not None
        scores.append(torch.tensor([token.logprob for token in logprobs.content]))
    assert 0 < (scores[0] - scores[1]).abs().mean() < 0.4 * scores[0].std()
    assert 0 < (scores[0] - scores[2]).abs().mean() < 0.2 * scores[0].std()
    assert caplog.text.count("Projections of latent vectors are kept in Q8_0") == 2
    projections = 2 * 4 * (2 * 32 + 32) * 128  # those of keys in both directions, in two layers
    plain, own = (plan_memory(each).weight_bytes for each in builders[:2])
    others = builder_of(wide).with_topology(Topology.empty().with_regex("kv_b_proj", LayerTopology(isq=IsqType.Q4K)))
    assert plain - plan_memory(others).weight_bytes == projections * 4 - projections * 34 // 32
    assert own < plain


async def test_a_drafter_with_latent_attention(checkpoint: Path) -> None:
    reference = reference_of(checkpoint)
    builder = TextSpeculativeBuilder(builder_of(checkpoint), builder_of(checkpoint), SpeculativeConfig(gamma=3))
    async with builder.build() as model:
        response = await model.send_completion_request(PROMPTS[3], GREEDY)
        assert text_of(response) == await model.detokenize(continued(reference, PROMPTS[3]))


async def test_choices_are_the_same_under_pressure(checkpoint: Path) -> None:
    sampling = SamplingParams(temperature=0.9, seed=3, n_choices=3, max_len=NUM_TOKENS, ignore_eos=True)
    texts = []
    for tokens in (2000, 112):
        async with builder_of(checkpoint).with_paged_attn(pool(tokens)).build() as model:
            wait_for_requests(model, 2)
            both = await asyncio.gather(*(model.send_completion_request(prompt, sampling) for prompt in PROMPTS[:2]))
            texts.append([choice.text for response in both for choice in response.choices])
            assert (model.stats().preemptions > 0) == (tokens == 112)
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 3


async def test_cached_prefixes_here_and_from_a_directory(checkpoint: Path, tmp_path: Path) -> None:
    builder = builder_of(checkpoint).with_paged_attn(pool(2000)).with_prefix_cache_dir(tmp_path / "stored")
    found = []
    for _ in range(2):
        async with builder.build() as model:
            responses = [await model.send_completion_request(PROMPTS[2], GREEDY) for _ in range(2)]
            found += [response.usage.prompt_tokens_details.cached_tokens for response in responses]
            expected = await model.detokenize(continued(reference_of(checkpoint), PROMPTS[2]))
            assert [text_of(response) for response in responses] == [expected] * 2
    assert found == [0, 64, 64, 64]


async def test_8_bit_keys_are_nearly_as_good(checkpoint: Path) -> None:
    scores = []
    for kind in (PagedCacheType.AUTO, PagedCacheType.F8E4M3):
        async with builder_of(checkpoint).with_paged_attn(pool(2000, kind)).build() as model:
            scores.append(await prompt_logprobs(model))
    error = (scores[0] - scores[1]).abs().mean()
    assert 0 < error < 0.2 * scores[0].std()


async def test_bytes_of_a_token(checkpoint: Path) -> None:
    """One vector of rotated and latent elements per layer, and none of any head."""
    plans = {
        kind: plan_memory(builder_of(checkpoint).with_paged_attn(pool(800, kind)))
        for kind in (PagedCacheType.AUTO, PagedCacheType.F8E4M3)
    }
    num_layers, size = 2, 16 + 32
    assert plans[PagedCacheType.AUTO].bytes_per_token == num_layers * size * 4
    assert plans[PagedCacheType.F8E4M3].bytes_per_token == num_layers * (size + 4)


def expected_bytes(path: Path, num_layers: int) -> int:
    """Return the bytes of weights in 8-bit blocks, but for vectors, rows that are no whole blocks, routers and
    projections of latent vectors.
    """
    found = 0.0
    for name, tensor in load_file(path / "model.safetensors").items():
        is_dense = tensor.ndim < 2 or tensor.shape[-1] % 32 or name.endswith((".kv_b_proj.weight", ".mlp.gate.weight"))
        if f".layers.{num_layers}." not in name:
            found += tensor.numel() * (4 if is_dense else 34 / 32)
    return int(found)


@needs_library
@pytest.mark.parametrize("family", ["youtu", pytest.param("deepseek_v3", marks=pytest.mark.long)])
async def test_planned_weights_are_those_that_are_loaded(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Projections of odd sizes stay dense, as the log says, and layers that predict tokens are not loaded."""
    caplog.set_level(logging.INFO, "paged_sdk")
    checkpoint = make_other_checkpoint(family, tmp_path / "model", **(CONFIGS[family] | {"v_head_dim": 20}))
    tensors = load_file(checkpoint / "model.safetensors")
    further = {
        name.replace(".1.", ".2.", 1): tensor.clone() for name, tensor in tensors.items() if ".layers.1." in name
    }
    save_file({**tensors, **further}, checkpoint / "model.safetensors", {"format": "pt"})
    plain = builder_of(checkpoint)
    quantized = plain.with_isq(IsqType.Q8_0)
    assert plan_memory(plain).weight_bytes == sum(4 * tensor.numel() for tensor in tensors.values())
    assert plan_memory(quantized).weight_bytes == expected_bytes(checkpoint, 2)
    for builder, count in ((plain, 0), (quantized, 1)):
        async with builder.build() as model:
            assert await prompt_logprobs(model) is not None
        assert caplog.text.count("Projections of latent vectors are kept in float32") == count


async def test_what_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="its keys are the values, too"):
        await builder_of(checkpoint).with_paged_attn(pool(800, PagedCacheType.Q4)).build()


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_batch_invariance(wide: Path, dtype: str) -> None:
    """Prompts attend over latent vectors then, however they are cut, and whatever is beside them."""
    builder = builder_of(wide).with_dtype(dtype).with_batch_invariance().with_paged_attn(pool(2000))
    scored = evolve(GREEDY, prompt_logprobs=0)
    found = []
    for budget, together in ((512, False), (112, False), (40, True)):
        async with builder.with_max_num_batched_tokens(budget).build() as model:
            if together:
                wait_for_requests(model, len(LONG))
                got = await asyncio.gather(*(model.send_completion_request(prompt, scored) for prompt in LONG))
            else:
                got = [await model.send_completion_request(prompt, scored) for prompt in LONG]
        found.append([(text_of(response), response.choices[0].prompt_logprobs) for response in got])
    assert found[0] == found[1] == found[2]


async def test_batch_invariance_needs_native_kernels(tmp_path: Path) -> None:
    odd = make_other_checkpoint("youtu", tmp_path, **(LATENT | {"v_head_dim": 20}))
    with pytest.raises(ConfigError, match="projections of its latent vectors have no native kernel"):
        await builder_of(odd).with_batch_invariance().build()


async def test_adapters_are_merged_weights(checkpoint: Path, tmp_path: Path) -> None:
    reference = reference_of(checkpoint)
    write_adapter(tmp_path / "adapter", reference, targets=TARGETS)
    expected = continued(reference, PROMPTS[0]), continued(merge(reference, tmp_path / "adapter"), PROMPTS[0])
    assert expected[0] != expected[1]
    async with builder_of(checkpoint).with_adapter(tmp_path / "adapter").build() as model:
        got = await asyncio.gather(
            model.send_completion_request(PROMPTS[0], GREEDY),
            model.send_completion_request(PROMPTS[0], GREEDY, adapter="adapter"),
        )
        for response, tokens in zip(got, expected, strict=True):
            assert text_of(response) == await model.detokenize(tokens)


async def test_adapters_of_the_projection_to_keys_and_values_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", reference_of(checkpoint), targets=("kv_b_proj", "o_proj"))
    with pytest.raises(AdapterError, match="kv_b_proj"):
        await builder_of(checkpoint).with_adapter(tmp_path / "adapter").build()


async def test_quantized_weights(checkpoint: Path) -> None:
    async with builder_of(checkpoint).build() as model, builder_of(checkpoint).with_isq(IsqType.Q8_0).build() as other:
        plain = await prompt_logprobs(model)
        await model.re_isq_model(IsqType.Q8_0)
        quantized = await prompt_logprobs(model)
        assert torch.equal(quantized, await prompt_logprobs(other))
    assert 0 < (plain - quantized).abs().mean() < 0.2 * plain.std()


@pytest.mark.parametrize("form", ["gptq", "awq", "fp8", "mlx"])
async def test_packed_projections_of_latent_vectors(checkpoint: Path, form: str, tmp_path: Path) -> None:
    write, settings = WRITERS[form]
    wide = tmp_path / "wide"
    sizes = {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 32}
    config = json.loads((checkpoint / "config.json").read_text())
    family = config["model_type"]
    make_other_checkpoint(family, wide, **(CONFIGS[family] | sizes | {"moe_intermediate_size": 64}))
    values = pack_checkpoint(wide, tmp_path / "packed", write, settings)
    packed = load_file(tmp_path / "packed" / "model.safetensors")
    assert any(".kv_b_proj." in name and not name.endswith(".weight") for name in packed)
    save_file(values, wide / "model.safetensors", {"format": "pt"})
    scores = []
    for path in (wide, tmp_path / "packed"):
        async with builder_of(path).build() as model:
            scores.append(await prompt_logprobs(model))
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=2e-3)


async def test_a_gguf_file_says_what_its_directory_says(checkpoint: Path, tmp_path: Path) -> None:
    file = write_gguf(checkpoint, tmp_path / "model.gguf", type="F32")
    texts = []
    for builder in (builder_of(checkpoint), GgufModelBuilder(file).with_dtype("float32").with_force_cpu()):
        async with builder.build() as model:
            texts.append(await texts_of(model))
    assert texts[0] == texts[1]


async def test_a_quantized_gguf_file(checkpoint: Path, tmp_path: Path) -> None:
    """The projections of latent vectors are decoded, and the other matrices stay as they are."""
    file = write_gguf(checkpoint, tmp_path / "model.gguf", type="Q8_0")
    scores = []
    for builder in (builder_of(checkpoint), GgufModelBuilder(file).with_force_cpu()):
        async with builder.build() as model:
            scores.append(await prompt_logprobs(model))
    assert 0 < (scores[0] - scores[1]).abs().mean() < 0.2 * scores[0].std()

"""Whole models with adapters, against transformers with the adapters merged into its weights."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file

from adapter_files import merge, write_adapter
from paged_sdk import (
    GgufModelBuilder,
    IsqType,
    MemoryGpuConfig,
    Model,
    PagedAttentionMeta,
    PagedCacheType,
    SamplingParams,
    TextModelBuilder,
)
from tiny import build_gguf_model, build_model, make_checkpoint, make_gguf

PROMPTS: Final = ([5, 6, 7, 8] * 6, [40, 41, 42] * 5)
GREEDY: Final = SamplingParams(temperature=0.0, max_len=10, ignore_eos=True)
SCORES: Final = SamplingParams(temperature=0.0, max_len=1, prompt_logprobs=0)
# Ranks that are no multiple of four, and matrices that only some layers or products have.
OTHER: Final[dict[str, Any]] = {
    "rank": 3,
    "targets": ("q_proj", "v_proj", "down_proj", "gate_up_proj"),
    "use_rslora": True,
    "rank_pattern": {"layers.1.self_attn.v_proj": 5, "down_proj": 2},
    "alpha_pattern": {"down_proj": 7},
}


def continued(model: Any, prompt: Sequence[int]) -> list[int]:
    """Return transformers' greedy tokens."""
    with torch.inference_mode():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=10, min_new_tokens=10, do_sample=False)
    tokens: list[int] = ids[0, len(prompt) :].tolist()
    return tokens


async def answers(model: Model, names: Sequence[str | None]) -> list[str]:
    """Continue every prompt through every adapter, all in one batch."""
    asked = [model.send_completion_request(prompt, GREEDY, adapter=name) for prompt in PROMPTS for name in names]
    return [response.choices[0].text for response in await asyncio.gather(*asked)]


async def compare(builder: TextModelBuilder, directory: Path, expected: list[list[int]]) -> None:
    builder = builder.with_dtype("float32").with_force_cpu().with_num_threads(1).with_adapter(directory / "first")
    async with builder.build() as model:
        await model.load_adapter(directory / "second", name="other")
        assert model.adapters == ("first", "other")
        texts = [await model.detokenize(tokens) for tokens in expected]
        assert await answers(model, [None, "first", "other"]) == texts
        assert len(set(texts)) > len(texts) // 2 + 1


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a llama and two adapters of it."""
    return written("llama", tmp_path_factory.mktemp("adapted"))


def written(family: str, directory: Path) -> Path:
    reference = build_model(family)
    make_checkpoint(family, directory / "base")
    write_adapter(directory / "first", reference, seed=1)
    write_adapter(directory / "second", reference, seed=2, **OTHER)
    return directory


def expected_tokens(family: str, directory: Path) -> list[list[int]]:
    models = [build_model(family), *(merge(build_model(family), directory / name) for name in ("first", "second"))]
    return [continued(model, prompt) for prompt in PROMPTS for model in models]


@pytest.mark.parametrize("family", ["qwen2", "phi3", "gemma2", "qwen3_moe"])
def test_texts_are_those_of_merged_weights(family: str, tmp_path: Path) -> None:
    """In the fused layers; phi3's query, key and value are one matrix."""
    directory = written(family, tmp_path)
    asyncio.run(compare(TextModelBuilder(directory / "base"), directory, expected_tokens(family, directory)))


def test_in_every_way_of_keeping_kv(base: Path) -> None:
    """Where chunks of prompts stand beside texts, layers run one at a time, blocks are shared, or texts preempted."""
    expected = expected_tokens("llama", base)
    builder = TextModelBuilder(base / "base").with_max_model_len(40)
    small = PagedAttentionMeta(block_size=4, gpu_memory=MemoryGpuConfig.ContextSize(72))
    for each in (
        builder.with_max_num_batched_tokens(7),
        builder.without_paged_attn(),
        builder.with_paged_attn(small),
        builder.with_batch_invariance(),
    ):
        asyncio.run(compare(each, base, expected))


async def scores(model: Model, name: str | None) -> torch.Tensor:
    """Return the log-probabilities of a prompt's tokens."""
    response = await model.send_completion_request(list(range(5, 45)), SCORES, adapter=name)
    assert response.prompt_logprobs is not None
    return torch.tensor([token.logprob for token in response.prompt_logprobs.content])


@pytest.mark.parametrize(
    ("kind", "decomposed"),
    [
        *((kind, False) for kind in ("file", "isq", "groups", "bfloat16", "fp8 cache", "one at a time")),
        *((kind, True) for kind in ("file", "groups", "bfloat16", "one at a time")),
    ],
)
def test_on_quantized_bases(kind: str, decomposed: bool, tmp_path: Path) -> None:
    """The adapter's part is not quantized: what is lost is what the base loses."""
    mild: dict[str, Any] = {"initializer_range": 0.1}
    reference = build_gguf_model("qwen2", **mild)
    write_adapter(tmp_path / "a", reference, seed=1, strength=0.1, use_dora=decomposed)
    make_checkpoint("qwen2", tmp_path / "base", **mild)
    merge(reference, tmp_path / "a").save_pretrained(tmp_path / "merged")
    (tmp_path / "merged" / "tokenizer.json").write_bytes((tmp_path / "base" / "tokenizer.json").read_bytes())
    plain = TextModelBuilder(tmp_path / "base").with_force_cpu().with_num_threads(1)
    builders: dict[str, TextModelBuilder | GgufModelBuilder] = {
        "isq": plain.with_isq(IsqType.Q8_0),
        "groups": plain.with_isq(IsqType.AFQ8),
        "one at a time": plain.with_isq(IsqType.Q8_0).without_paged_attn(),
        "bfloat16": plain.with_dtype("bfloat16"),
        "fp8 cache": plain.with_dtype("float32").with_paged_attn(PagedAttentionMeta(cache_type=PagedCacheType.F8E4M3)),
    }
    if kind == "file":
        file = make_gguf(tmp_path / "gguf", family="qwen2", quantization="Q8_0", **mild)
        builders["file"] = GgufModelBuilder(file).with_force_cpu().with_num_threads(1)

    async def run() -> None:
        exact = TextModelBuilder(tmp_path / "merged").with_force_cpu().with_num_threads(1).with_dtype("float32")
        async with exact.build() as model:
            expected = await scores(model, None)
        async with builders[kind].with_adapter(tmp_path / "a").build() as model:
            adapted, unadapted = await scores(model, "a"), await scores(model, None)
        assert (adapted - expected).norm() < (unadapted - expected).norm() / 8

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.parametrize(
    ("family", "decomposed"), [("llama", False), ("gemma2", False), ("qwen2", True), ("gemma2", True)]
)
def test_texts_are_those_of_peft(family: str, decomposed: bool, tmp_path: Path) -> None:
    """PEFT writes the files and computes the texts. Of two, one may be decomposed (DoRA)."""
    peft: Any = importlib.import_module("peft")  # it has no annotations
    expected: dict[str, list[list[int]]] = {}
    settings: dict[str, dict[str, Any]] = {
        "first": {"r": 4, "lora_alpha": 16, "use_dora": decomposed},
        "second": {"r": 6, "use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"o_proj": 3}},
    }
    for name, own in settings.items():
        targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
        if family != "gemma2":  # merging would change its embeddings, too
            targets.append("lm_head")
        adapted = peft.get_peft_model(build_model(family), peft.LoraConfig(target_modules=targets, **own))
        generator = torch.Generator().manual_seed(len(name))
        for key, parameter in adapted.named_parameters():
            if "lora_magnitude" in key:
                parameter.data *= 1 + torch.randn(parameter.shape, generator=generator).clamp(-2, 2) / 4
            elif "lora_" in key:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15
        adapted.save_pretrained(tmp_path / name)
        expected[name] = [continued(adapted.eval(), prompt) for prompt in PROMPTS]
        merged = adapted.merge_and_unload()
        assert [continued(merged, prompt) for prompt in PROMPTS] == expected[name]
    make_checkpoint(family, tmp_path / "base")
    plain = [continued(build_model(family), prompt) for prompt in PROMPTS]
    rows = [tokens for three in zip(plain, expected["first"], expected["second"], strict=True) for tokens in three]
    asyncio.run(compare(TextModelBuilder(tmp_path / "base"), tmp_path, rows))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_embeddings_are_those_of_peft(family: str, tmp_path: Path) -> None:
    """gemma2 scales its own, which are its output projection, too: that stays what it is."""
    peft: Any = importlib.import_module("peft")  # it has no annotations
    expected = [[continued(build_model(family), prompt) for prompt in PROMPTS]]
    for name, targets in (("first", ["embed_tokens", "q_proj"]), ("second", ["embed_tokens"])):
        config = peft.LoraConfig(r=len(name), lora_alpha=6, target_modules=targets)
        adapted = peft.get_peft_model(build_model(family), config)
        generator = torch.Generator().manual_seed(len(name))
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
        adapted.save_pretrained(tmp_path / name)
        expected.append([continued(adapted.eval(), prompt) for prompt in PROMPTS])
    make_checkpoint(family, tmp_path / "base")
    rows = [tokens for three in zip(*expected, strict=True) for tokens in three]
    for builder in (TextModelBuilder(tmp_path / "base"), TextModelBuilder(tmp_path / "base").without_paged_attn()):
        asyncio.run(compare(builder, tmp_path, rows))


def test_an_output_projection_that_is_the_embeddings(tmp_path: Path) -> None:
    """Through an adapter it is another one, for a prompt's scores, too."""
    reference: Any = build_model("gemma2")
    make_checkpoint("gemma2", tmp_path / "base")
    write_adapter(tmp_path / "a", reference, seed=1, targets=("lm_head",))
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    down, up = (tensors[f"base_model.model.lm_head.lora_{side}.weight"] for side in "AB")
    prompt, cap = list(range(5, 45)), reference.config.final_logit_softcapping
    with torch.inference_mode():
        hidden = reference.model(torch.tensor([prompt])).last_hidden_state[0]
        logits = cap * (hidden @ (reference.lm_head.weight + 2 * up @ down).T / cap).tanh()
    expected = logits.log_softmax(-1)[range(39), prompt[1:]]
    builder = TextModelBuilder(tmp_path / "base").with_dtype("float32").with_force_cpu().with_num_threads(1)

    async def run(each: TextModelBuilder) -> None:
        async with each.with_adapter(tmp_path / "a").build() as model:
            adapted, unadapted = await asyncio.gather(scores(model, "a"), scores(model, None))
            both = await asyncio.gather(
                *(model.score(prompt[1:], prefix=prompt[:1], adapter=name) for name in ("a", None))
            )
        assert torch.allclose(adapted, expected, atol=1e-3)
        assert not torch.allclose(unadapted, expected, atol=0.1)
        for response, logprobs in zip(both, (adapted, unadapted), strict=True):
            assert response.scores[0].logprobs.tolist() == pytest.approx(logprobs.tolist(), abs=1e-3)

    for each in (builder, builder.without_paged_attn(), builder.with_max_num_batched_tokens(7)):
        asyncio.run(run(each))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_activated_adapters_are_peft_s(tmp_path: Path) -> None:
    """In chunks of the prompt too, of which one holds the invocation; and through the base where it is missing."""
    peft: Any = importlib.import_module("peft")  # it has no annotations
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, alora_invocation_tokens=[7, 8, 5], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(build_model("llama"), config)
    generator = torch.Generator().manual_seed(0)
    for key, parameter in adapted.named_parameters():
        if "lora_" in key:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    adapted.save_pretrained(tmp_path / "first")
    make_checkpoint("llama", tmp_path / "base")
    adapted.eval()
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            tokens = adapted.generate(input_ids=ids, max_new_tokens=10, min_new_tokens=10, do_sample=False)
        expected.append(tokens[0, len(prompt) :].tolist())
    plain = [continued(build_model("llama"), prompt) for prompt in PROMPTS]
    assert expected[0] != plain[0]
    assert expected[1] == plain[1]
    builder = TextModelBuilder(tmp_path / "base").with_dtype("float32").with_force_cpu().with_num_threads(1)

    async def run(each: TextModelBuilder) -> None:
        async with each.with_adapter(tmp_path / "first").build() as model:
            assert await answers(model, ["first"]) == [await model.detokenize(tokens) for tokens in expected]

    for each in (builder, builder.with_max_num_batched_tokens(5), builder.without_paged_attn()):
        asyncio.run(run(each))

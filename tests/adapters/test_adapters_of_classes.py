"""Adapters of models that run through transformers' classes, against PEFT around the same classes."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from benchmarks.tiny_classes import tiny_model
from torch import Tensor
from transformers import GenerationConfig

import tiny
from native_weights import needs_library
from paged_sdk import AdapterError, IsqType, Model, SamplingParams, TextModelBuilder
from quantized_writers import WRITERS, pack_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]

PROMPTS: Final = ([5, 6, 7, 8] * 6, [40, 41, 42] * 5)
GREEDY: Final = SamplingParams(temperature=0.0, max_len=8, ignore_eos=True)
SCORES: Final = SamplingParams(temperature=0.0, max_len=1, prompt_logprobs=0)
# Queries, keys and values in one matrix, whose rows are mixed; matrices with a row per input; biases everywhere.
TARGETS: Final = {
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "opt": ["q_proj", "v_proj", "out_proj", "fc1", "fc2"],
}


def make_base(family: str, directory: Path) -> Any:
    model = tiny_model(family, vocab_size=tiny.VOCAB_SIZE, max_position_embeddings=512)
    model.generation_config = GenerationConfig.from_dict({"eos_token_id": 2})
    model.save_pretrained(directory)
    tiny.tokenizer().save(str(directory / "tokenizer.json"))
    return model


def adapted(model: Any, family: str, directory: Path, *, seed: int, strength: float = 0.15, **options: Any) -> Any:
    """Put PEFT around a model, with an adapter of random weights that is saved, too."""
    peft: Any = importlib.import_module("peft")  # it has no annotations
    options |= {"target_modules": TARGETS[family], "fan_in_fan_out": family == "gpt2"}
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **options))
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in made.named_parameters():
        if "lora_magnitude" in key:
            parameter.data *= 1 + torch.rand(parameter.shape, generator=generator) / 2
        elif "lora_" in key:
            parameter.data = torch.randn(parameter.shape, generator=generator) * strength
    made.save_pretrained(directory)
    return made.eval()


def continued(model: Any, prompt: list[int]) -> list[int]:
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(8):
            text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("family", TARGETS)
def test_texts_are_those_of_peft(family: str, tmp_path: Path) -> None:
    """In one batch: the base's, an adapter's and a decomposed one's."""
    expected = [[continued(make_base(family, tmp_path / "base"), prompt) for prompt in PROMPTS]]
    for seed, name in enumerate(("plain", "decomposed")):
        made = adapted(
            make_base(family, tmp_path / "base"), family, tmp_path / name, seed=seed, use_dora=name == "decomposed"
        )
        expected.append([continued(made, prompt) for prompt in PROMPTS])

    async def run() -> list[str]:
        builder = TextModelBuilder(tmp_path / "base").with_dtype("float32").with_force_cpu().with_num_threads(1)
        async with builder.with_adapter(tmp_path / "plain").build() as model:
            await model.load_adapter(tmp_path / "decomposed")
            asked = [
                model.send_completion_request(prompt, GREEDY, adapter=name)
                for name in (None, "plain", "decomposed")
                for prompt in PROMPTS
            ]
            texts = [response.choices[0].text for response in await asyncio.gather(*asked)]
            assert texts == [await model.detokenize(tokens) for rows in expected for tokens in rows]
        return texts

    assert len(set(asyncio.run(run()))) > 3


async def scores(model: Model, name: str | None) -> Tensor:
    response = await model.send_completion_request(list(range(5, 45)), SCORES, adapter=name)
    assert response.prompt_logprobs is not None
    return torch.tensor([token.logprob for token in response.prompt_logprobs.content])


@needs_library
@pytest.mark.parametrize(
    ("kind", "decomposed"), [("isq", True), ("groups", False), ("gptq", False), ("gptq", True), ("bfloat16", False)]
)
def test_on_quantized_bases(kind: str, decomposed: bool, tmp_path: Path) -> None:
    model = make_base("opt", tmp_path / "base")
    builder = TextModelBuilder(tmp_path / "base").with_force_cpu().with_num_threads(1)
    match kind:
        case "isq":
            builder = builder.with_isq(IsqType.Q8_0)
        case "groups":
            builder = builder.with_isq(IsqType.AFQ8)
        case "bfloat16":
            builder = builder.with_dtype("bfloat16")
        case "gptq":
            write, settings = WRITERS["gptq"]
            values = pack_checkpoint(tmp_path / "base", tmp_path / "packed", write, settings)
            model.load_state_dict(values, strict=False)
            builder = TextModelBuilder(tmp_path / "packed").with_force_cpu().with_num_threads(1)
    made = adapted(model, "opt", tmp_path / "a", seed=0, strength=0.1, use_dora=decomposed)
    prompt = list(range(5, 45))
    with torch.inference_mode():
        logits = made(input_ids=torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(-1)[range(39), prompt[1:]]

    async def run() -> None:
        async with builder.with_adapter(tmp_path / "a").build() as built:
            through, without = await asyncio.gather(scores(built, "a"), scores(built, None))
        assert (through - expected).norm() < (without - expected).norm() / 8

    asyncio.run(run())


def test_the_class_s_output_projection_stays_what_it_is(tmp_path: Path) -> None:
    peft: Any = importlib.import_module("peft")
    made = peft.get_peft_model(make_base("gpt_neox", tmp_path / "base"), peft.LoraConfig(target_modules=["lm_head"]))
    made.save_pretrained(tmp_path / "head")

    async def run() -> None:
        builder = TextModelBuilder(tmp_path / "base").with_force_cpu().with_num_threads(1)
        with pytest.raises(AdapterError, match="cannot be adapted"):
            await builder.with_adapter(tmp_path / "head").build()

    asyncio.run(run())

"""Models with mixtures of experts, through the public face, against transformers."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedModel

import tiny
from native_weights import needs_library
from paged_sdk import GgufModelBuilder, IsqType, Model, SamplingParams, TextModelBuilder

pytestmark = pytest.mark.anyio

FAMILIES = ("mixtral", "qwen3_moe")
NUM_TOKENS = 12
PROMPTS = [list(range(5 + length, 5 + 4 * length, 3)) for length in (3, 20, 47, 90)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def reference_texts(reference: PreTrainedModel) -> list[str]:
    """Return what transformers generates greedily, end tokens or not."""
    model: Any = reference
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # its own stops at end tokens
    texts = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        texts.append(tiny.tokenizer().decode(output[0, len(prompt) :].tolist()))
    return texts


async def texts(model: Model) -> list[str]:
    """Return the same of ours, all at once."""
    sampling = SamplingParams(temperature=0, max_len=NUM_TOKENS, ignore_eos=True)
    results: dict[int, str] = {}

    async def send(index: int, prompt: list[int]) -> None:
        results[index] = (await model.send_completion_request(prompt, sampling)).choices[0].text

    async with anyio.create_task_group() as tasks:
        for index, prompt in enumerate(PROMPTS):
            tasks.start_soon(send, index, prompt)
    return [results[index] for index in range(len(PROMPTS))]


@pytest.mark.parametrize("family", FAMILIES)
async def test_safetensors(family: str, tmp_path: Path) -> None:
    builder = TextModelBuilder(tiny.make_checkpoint(family, tmp_path)).with_dtype("float32").with_force_cpu()
    expected = reference_texts(tiny.build_model(family))
    async with builder.with_num_threads(1).with_max_num_batched_tokens(29).build() as model:
        assert await texts(model) == expected
    async with builder.with_num_threads(1).without_paged_attn().build() as model:
        assert await texts(model) == expected


@pytest.mark.parametrize("family", FAMILIES)
async def test_gguf(family: str, tmp_path: Path) -> None:
    builder = GgufModelBuilder(tiny.make_gguf(tmp_path, family=family)).with_dtype("float32").with_force_cpu()
    async with builder.with_num_threads(1).build() as model:
        assert await texts(model) == reference_texts(tiny.build_gguf_model(family))


async def prompt_logprobs(model: Model, num_tokens: int) -> list[float]:
    """Return the logprobs of an arbitrary text."""
    sampling = SamplingParams(temperature=0, max_len=1, prompt_logprobs=0)
    response = await model.send_completion_request([7 * i % 500 + 3 for i in range(num_tokens)], sampling)
    assert response.prompt_logprobs is not None
    return [token.logprob for token in response.prompt_logprobs.content]


def distance(first: list[float], second: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)


@needs_library
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0"])
async def test_experts_stay_in_their_blocks(
    family: str, quantization: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Against the same file's weights decoded; errors stay near their size with smaller weights than tiny's own."""
    file = tiny.make_gguf(tmp_path, family=family, quantization=quantization, initializer_range=0.1)
    builder = GgufModelBuilder(file).with_force_cpu().with_num_threads(1)
    async with builder.with_dtype("float32").build() as model:
        exact = await prompt_logprobs(model, 150)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        async with builder.build() as model:
            assert 0 < distance(await prompt_logprobs(model, 150), exact) < 0.1
            assert len(await texts(model)) == len(PROMPTS)
    assert "Experts are kept" not in caplog.text
    assert "Layers run one operation at a time" not in caplog.text
    async with builder.without_paged_attn().build() as model:
        assert 0 < distance(await prompt_logprobs(model, 150), exact) < 0.1


@needs_library
@pytest.mark.parametrize("stacked", [True, False])
async def test_experts_are_quantized_while_loading(tmp_path: Path, *, stacked: bool) -> None:
    """Of both kinds of checkpoint: with a tensor of all experts, and with one for each."""
    directory = tiny.make_checkpoint("qwen3_moe", tmp_path, initializer_range=0.1)
    if stacked:
        stack(directory)
    builder = TextModelBuilder(directory).with_force_cpu().with_num_threads(1).with_dtype("float32")
    async with builder.build() as model:
        exact = await prompt_logprobs(model, 60)
    distances = []
    for isq in (IsqType.Q4_0, IsqType.Q5_0, IsqType.Q8_0):
        async with builder.with_isq(isq).build() as model:
            distances.append(distance(await prompt_logprobs(model, 60), exact))
    assert distances == sorted(distances, reverse=True)
    assert 0 < distances[-1] < distances[0] / 4


def stack(directory: Path) -> None:
    """Put all experts of a layer into two tensors, as transformers has them in memory."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    name = re.compile(r"(.+\.experts\.)0\.down_proj\.weight")
    for block in [found[1] for found in map(name.fullmatch, list(tensors)) if found]:
        experts = [
            [tensors.pop(f"{block}{expert}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for expert in range(8)
        ]
        tensors[f"{block}gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in experts])
        tensors[f"{block}down_proj"] = torch.stack([down for *_, down in experts])
    save_file(tensors, file)

"""Models with mixtures of experts, through the public face, against transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
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
    """What transformers generates greedily, end tokens or not."""
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
    """The same of ours, all at once."""
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


@needs_library
async def test_what_is_quantised_beside_experts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    builder = TextModelBuilder(tiny.make_checkpoint("qwen3_moe", tmp_path)).with_force_cpu().with_num_threads(1)
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        async with builder.with_dtype("float32").with_isq(IsqType.Q8_0).build() as model:
            assert len(await texts(model)) == len(PROMPTS)
    assert "Experts are kept in torch.float32: only the other matrices are quantised." in caplog.text
    assert "Layers run one operation at a time: its layers have experts." in caplog.text

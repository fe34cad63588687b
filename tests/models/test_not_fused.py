"""Models that the fused native layers do not know, in an engine: as transformers has them, one operation at a time."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import tiny
from native_weights import needs_library
from paged_sdk import ConfigError, Model, SamplingParams, TextModelBuilder

pytestmark = [pytest.mark.anyio, needs_library]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def continuation(model: Model, prompt: list[int], num_tokens: int = 20) -> list[int]:
    sampling = SamplingParams(temperature=0, max_len=num_tokens, ignore_eos=True, top_n_logprobs=0)
    logprobs = (await model.send_completion_request(prompt, sampling)).choices[0].logprobs
    assert logprobs is not None
    return [token.token_id for token in logprobs.content]


def expected(reference: PreTrainedModel, prompt: list[int], num_tokens: int = 20) -> list[int]:
    text, model = list(prompt), reference
    with torch.inference_mode():
        for _ in range(num_tokens):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
async def test_activations(activation: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paged_sdk")
    checkpoint = tiny.make_checkpoint("llama", tmp_path, hidden_act=activation)
    reference = tiny.build_model("llama", hidden_act=activation)
    builder = TextModelBuilder(checkpoint).with_force_cpu().with_dtype("float32")
    async with builder.build() as model:
        for prompt in ([5, 7, 11], list(range(60))):
            assert await continuation(model, prompt) == expected(reference, prompt)
    assert f"the native decoder has no activation {activation}" in caplog.text
    with pytest.raises(ConfigError, match=f"no activation {activation}"):
        await builder.with_batch_invariance().build()


async def test_sizes_of_heads(tmp_path: Path) -> None:
    checkpoint = tiny.make_checkpoint("llama", tmp_path, head_dim=24)
    builder = TextModelBuilder(checkpoint).with_force_cpu().with_batch_invariance()
    with pytest.raises(ConfigError, match="the size of its heads is not a multiple of 16"):
        await builder.build()

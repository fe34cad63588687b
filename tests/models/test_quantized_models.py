"""Whole models of quantized safetensors: their greedy tokens are those of the same values in a dense checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from reference_decoding import CPU, DictSource, greedy, paged, random_prompt

import tiny
from paged_sdk import IsqType, SamplingParams, TextModelBuilder
from paged_sdk.models.loading import load_model
from paged_sdk.weights.checkpoint import open_checkpoint
from quantized_writers import WRITERS, pack_checkpoint


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# phi3 has merged queries, keys and values in one tensor, qwen3_moe experts.
@pytest.mark.parametrize(
    ("name", "family"), [*((name, "qwen2") for name in WRITERS), ("gptq", "phi3"), ("gptq", "qwen3_moe")]
)
def test_greedy_tokens_are_those_of_the_decoded_model(name: str, family: str, tmp_path: Path) -> None:
    write, settings = WRITERS[name]
    values = pack_checkpoint(tiny.make_checkpoint(family, tmp_path / "dense"), tmp_path / "packed", write, settings)
    checkpoint = open_checkpoint(tmp_path / "packed")
    assert checkpoint.is_quantized
    assert set(checkpoint.source.names()) == set(values)
    model = load_model(checkpoint.config, checkpoint.source, dtype=torch.float32, placement=CPU)
    checkpoint.source.close()
    dense = load_model(checkpoint.config, DictSource(values), dtype=torch.float32, placement=CPU)
    prompt = random_prompt(40)
    assert greedy(model, paged(8), prompt, 24) == greedy(dense, paged(8), prompt, 24)


@pytest.mark.anyio
async def test_isq_of_weights_that_are_quantized_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The variable leaves them alone, the builder quantizes them again, and both say so."""
    write, settings = WRITERS["gptq"]
    pack_checkpoint(tiny.make_checkpoint("llama", tmp_path / "dense"), tmp_path / "packed", write, settings)
    builder = TextModelBuilder(tmp_path / "packed").with_force_cpu().with_num_threads(1)
    sampling = SamplingParams(temperature=0, max_len=1, prompt_logprobs=0)

    async def logprobs(of: TextModelBuilder) -> list[float]:
        async with of.build() as model:
            response = await model.send_completion_request(random_prompt(64), sampling)
        assert response.prompt_logprobs is not None
        return [token.logprob for token in response.prompt_logprobs.content]

    plain = await logprobs(builder)
    monkeypatch.setenv("MISTRALRS_ISQ", "4")
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        assert await logprobs(builder) == plain
    assert "it is quantized already" in caplog.text
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        assert await logprobs(builder.with_isq(IsqType.Q4_0)) != plain
    assert "are requantized to" in caplog.text

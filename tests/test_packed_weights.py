"""GGUF files on the CPU through the public face: their blocks stay as they are, with the native library or without."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import tiny
from native_weights import needs_library
from paged_sdk import (
    GgufModelBuilder,
    Model,
    RequestBuilder,
    SamplingParams,
    TextMessages,
    TextModelBuilder,
)
from paged_sdk.kernels.native.library import why_not
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.weights.gguf.source import GgufSource

pytestmark = pytest.mark.anyio

QUESTION = RequestBuilder.from_messages(
    TextMessages().add_message("user", "Name the capital of France.")
).with_sampling(SamplingParams(temperature=0, max_len=24))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a llama whose errors stay near their size: tiny's own weights attend very sharply."""
    return tiny.make_gguf(tmp_path_factory.mktemp("packed"), quantization="Q8_0", initializer_range=0.1)


def builder(file: Path) -> GgufModelBuilder:
    return GgufModelBuilder(file).with_force_cpu().with_num_threads(1)


def hide_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_sdk.build.assembly.load", lambda: None)


async def prompt_logprobs(model: Model, num_tokens: int) -> list[float]:
    """Return the logprobs of an arbitrary text."""
    sampling = SamplingParams(temperature=0, max_len=1, prompt_logprobs=0)
    response = await model.send_completion_request([7 * i % 500 + 3 for i in range(num_tokens)], sampling)
    assert response.prompt_logprobs is not None
    return [token.logprob for token in response.prompt_logprobs.content]


def distance(first: list[float], second: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)


async def exact_logprobs(file: Path, num_tokens: int) -> list[float]:
    async with builder(file).with_dtype("float32").build() as model:
        return await prompt_logprobs(model, num_tokens)


@needs_library
@pytest.mark.parametrize("num_tokens", [30, 150])
async def test_a_dtype_that_is_left_open_keeps_the_blocks(
    file: Path, num_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        async with builder(file).build() as model:
            packed = await prompt_logprobs(model, num_tokens)
    assert "Attention: native CPU kernels." in caplog.text
    assert "one operation at a time" not in caplog.text
    assert 0 < distance(packed, await exact_logprobs(file, num_tokens)) < 0.05


@needs_library
async def test_a_dtype_that_is_asked_for_decodes_them(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        exact = await exact_logprobs(file, 30)
    assert "Layers run one operation at a time" not in caplog.text
    # Another backend, the same decoded weights: nothing but the order of sums differs.
    async with builder(file).with_dtype("float32").without_paged_attn().build() as model:
        assert distance(await prompt_logprobs(model, 30), exact) < 1e-4


async def test_a_checkpoint_of_plain_numbers_stays_dense(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        async with TextModelBuilder(tiny_checkpoint).with_force_cpu().with_num_threads(1).build() as model:
            await model.send_completion_request("Once", SamplingParams(temperature=0, max_len=4))
    assert ("Layers run one operation at a time" in caplog.text) == (why_not() is not None)


@needs_library
async def test_contiguous_memory_takes_packed_weights_too(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        async with builder(file).without_paged_attn().build() as model:
            packed = await prompt_logprobs(model, 150)
    assert "Layers run one operation at a time: its attention is not native." in caplog.text
    assert 0 < distance(packed, await exact_logprobs(file, 150)) < 0.05


@needs_library
async def test_an_output_projection_of_plain_numbers(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some files have it for quality's sake."""
    of_all = GgufSource.matrix

    def matrix(source: GgufSource, name: str) -> StoredMatrix:
        stored = of_all(source, name)
        return DenseMatrix(stored.decoded()) if name == "lm_head.weight" else stored

    monkeypatch.setattr(GgufSource, "matrix", matrix)
    for chosen in (builder(file), builder(file).with_batch_invariance()):
        async with chosen.build() as model:
            assert 0 < distance(await prompt_logprobs(model, 30), await exact_logprobs(file, 30)) < 0.05


@pytest.mark.parametrize("num_tokens", [30, 150])
async def test_without_the_library_torch_does_it_all(
    file: Path, num_tokens: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hide_library(monkeypatch)
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        async with builder(file).build() as model:
            rotated = await prompt_logprobs(model, num_tokens)
    assert "Attention: torch (native CPU kernels: they are absent)." in caplog.text
    assert "Layers run one operation at a time: its attention is not native." in caplog.text
    assert 0 < distance(rotated, await exact_logprobs(file, num_tokens)) < 0.05


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_library), False])
async def test_every_family_chats(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, native: bool
) -> None:
    if not native:
        hide_library(monkeypatch)
    file = tiny.make_gguf(tmp_path, family=family, quantization="Q4_0")
    async with builder(file).build() as model:
        response = await model.send_chat_request(QUESTION)
        assert response.usage.completion_tokens > 0
        again = await model.send_chat_request(QUESTION)
        assert again.choices == response.choices
    assert response.choices[0].finish_reason in ("stop", "length")


@pytest.mark.smollm2
async def test_a_real_model_without_the_library(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_library(monkeypatch)
    few = QUESTION.with_sampling(SamplingParams(temperature=0, max_len=8))  # each takes torch half a second
    async with GgufModelBuilder(smollm2).with_force_cpu().with_max_model_len(512).build() as model:
        response = await model.send_chat_request(few)
    assert "Paris" in response.choices[0].message.content

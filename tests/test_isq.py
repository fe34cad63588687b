"""Quantizing while loading, through the public face."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import tiny
from paged_sdk import (
    ConfigError,
    GgufModelBuilder,
    IsqType,
    LayerTopology,
    Model,
    SamplingParams,
    TextModelBuilder,
    Topology,
)
from paged_sdk.kernels.native.library import why_not

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(why_not() is not None, reason=f"native kernels: {why_not()}"),
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write rows of 256, which the K formats need."""
    directory = tmp_path_factory.mktemp("wide")
    return tiny.make_checkpoint("llama", directory, hidden_size=256, intermediate_size=512, head_dim=64)


async def prompt_logprobs(model: Model) -> list[float]:
    sampling = SamplingParams(temperature=0, max_len=1, prompt_logprobs=0)
    response = await model.send_completion_request(list(range(5, 60)), sampling)
    assert response.prompt_logprobs is not None
    return [token.logprob for token in response.prompt_logprobs.content]


def distance(first: list[float], second: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)


async def test_more_bits_are_nearer_to_the_checkpoint(wide_checkpoint: Path) -> None:
    builder = TextModelBuilder(wide_checkpoint).with_force_cpu().with_num_threads(1)
    async with builder.with_dtype("float32").build() as model:
        exact = await prompt_logprobs(model)
    distances = []
    for isq in (IsqType.Q2K, IsqType.Q3K, IsqType.Q4K, IsqType.Q5K, IsqType.Q6K, IsqType.Q8_0):
        async with builder.with_dtype("float32").with_isq(isq).build() as model:
            distances.append(distance(await prompt_logprobs(model), exact))
    assert distances == sorted(distances, reverse=True)
    assert 0 < distances[-1] < distances[0] / 4


async def test_what_narrow_rows_take_is_said(wide_checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    topology = Topology.empty().with_range(range(1), LayerTopology(isq=IsqType.Q8_0))
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        async with TextModelBuilder(wide_checkpoint).with_force_cpu().with_isq(IsqType.Q4K).build():
            assert "do not fit" not in caplog.text
        narrow = TextModelBuilder(tiny.make_checkpoint("llama", wide_checkpoint.parent / "narrow")).with_force_cpu()
        async with narrow.with_isq(IsqType.Q4K).with_topology(topology).build():
            assert "7 matrices take Q5_0: rows of 64 and 128 do not fit Q4K." in caplog.text
            assert "2 matrices take Q8_0: rows of 64 do not fit Q6K." in caplog.text  # embeddings and head


async def test_types_of_groups(wide_checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    builder = TextModelBuilder(wide_checkpoint).with_force_cpu().with_num_threads(1).with_dtype("float32")
    async with builder.build() as model:
        exact = await prompt_logprobs(model)
    distances = {}
    for isq in (IsqType.AFQ2, IsqType.AFQ4, IsqType.NF4, IsqType.HQQ8, IsqType.INT8, IsqType.FP8):
        with caplog.at_level(logging.INFO, logger="paged_sdk"):
            async with builder.with_isq(isq).build() as model:
                distances[isq] = distance(await prompt_logprobs(model), exact)
    assert "one operation at a time" not in caplog.text
    assert 0 < distances[IsqType.HQQ8] < distances[IsqType.AFQ4] < distances[IsqType.AFQ2]
    assert 0 < distances[IsqType.INT8] < distances[IsqType.NF4] < distances[IsqType.AFQ2]
    assert 0 < distances[IsqType.FP8] < distances[IsqType.AFQ2]


async def test_experts_of_groups(tmp_path: Path) -> None:
    checkpoint = tiny.make_checkpoint("qwen3_moe", tmp_path)
    builder = TextModelBuilder(checkpoint).with_force_cpu().with_num_threads(1).with_dtype("float32")
    async with builder.build() as model:
        exact = await prompt_logprobs(model)
    async with builder.with_isq(IsqType.AFQ8).build() as model:
        assert 0 < distance(await prompt_logprobs(model), exact) < 1


@pytest.mark.parametrize("family", ["qwen2", "phi3", "gemma2"])
async def test_rows_that_are_narrow_for_a_type_take_a_wider_one(family: str, tmp_path: Path) -> None:
    checkpoint = tiny.make_checkpoint(family, tmp_path)
    builder = TextModelBuilder(checkpoint).with_force_cpu().with_num_threads(1).with_dtype("float32")
    async with builder.build() as model:
        exact = await prompt_logprobs(model)
    async with builder.with_isq(IsqType.Q6K).build() as model:
        assert 0 < distance(await prompt_logprobs(model), exact) < 1


async def test_auto_isq_takes_bits(wide_checkpoint: Path) -> None:
    builder = TextModelBuilder(wide_checkpoint).with_force_cpu().with_num_threads(1)
    async with builder.with_auto_isq(4).build() as four, builder.with_isq(IsqType.Q4K).build() as q4k:
        assert await prompt_logprobs(four) == await prompt_logprobs(q4k)
    with pytest.raises(ConfigError, match="with_auto_isq"):
        builder.with_auto_isq(7)


async def test_the_environment_leaves_quantized_checkpoints_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gguf = GgufModelBuilder(tiny.make_gguf(tmp_path, quantization="Q8_0")).with_force_cpu().with_num_threads(1)
    async with gguf.build() as model:
        plain = await prompt_logprobs(model)
    monkeypatch.setenv("MISTRALRS_ISQ", "4")
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        async with gguf.build() as model:
            assert await prompt_logprobs(model) == plain
    assert "quantized already" in caplog.text
    async with gguf.with_isq(IsqType.Q4_0).build() as model:
        assert await prompt_logprobs(model) != plain


async def test_the_environment_quantizes_what_is_not(wide_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = TextModelBuilder(wide_checkpoint).with_force_cpu().with_num_threads(1)
    async with builder.with_isq(IsqType.Q8_0).build() as model:
        expected = await prompt_logprobs(model)
    monkeypatch.setenv("MISTRALRS_ISQ", "Q8_0")
    async with builder.build() as model:
        assert await prompt_logprobs(model) == expected


@pytest.mark.parametrize("paged", [True, False])
async def test_float16(wide_checkpoint: Path, *, paged: bool) -> None:
    builder = TextModelBuilder(wide_checkpoint).with_force_cpu().with_num_threads(1).with_isq(IsqType.Q6K)
    builder = builder if paged else builder.without_paged_attn()
    logprobs = {}
    for dtype in ("float32", "bfloat16", "float16"):
        async with builder.with_dtype(dtype).build() as model:
            logprobs[dtype] = await prompt_logprobs(model)
    wide = logprobs["float32"]
    assert 0 < distance(logprobs["float16"], wide) < distance(logprobs["bfloat16"], wide)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
async def test_without_the_native_library(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tiny.make_checkpoint(family, tmp_path)
    builder = TextModelBuilder(checkpoint).with_force_cpu().with_num_threads(1).with_dtype("float32")
    async with builder.build() as model:
        exact = await prompt_logprobs(model)
    monkeypatch.setattr("paged_sdk.build.assembly.load", lambda: None)
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        async with builder.with_isq(IsqType.Q8_0).build() as model:
            assert 0 < distance(await prompt_logprobs(model), exact) < 1
        with pytest.raises(ConfigError, match="without the native kernels one of Q2K"):
            await builder.with_isq(IsqType.HQQ4).build()
        monkeypatch.setenv("MISTRALRS_ISQ", "HQQ4")
        with pytest.raises(ConfigError, match=r"^MISTRALRS_ISQ = 'HQQ4' is not allowed: .* without the native kernels"):
            await builder.build()
    assert ("only the other matrices are quantized" in caplog.text) == (family == "qwen3_moe")


async def test_a_dtype_that_no_quantized_form_computes_in_is_refused(tiny_checkpoint: Path) -> None:
    builder = TextModelBuilder(tiny_checkpoint).with_force_cpu().with_dtype("float64").with_isq(IsqType.Q8_0)
    with pytest.raises(ConfigError, match="expected float32, bfloat16 or float16, beside isq = Q8_0") as caught:
        await builder.build()
    assert (caught.value.setting, caught.value.value) == ("dtype", "float64")


async def test_a_device_without_kernels_for_blocks_is_refused(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paged_sdk.build.placement.choose_device", lambda _: torch.device("meta"))
    with pytest.raises(ConfigError, match=r"a CPU, or a GPU with Triton's kernels \(here meta: ") as caught:
        await TextModelBuilder(tiny_checkpoint).with_isq(IsqType.Q8_0).build()
    assert (caught.value.setting, caught.value.value) == ("isq", "Q8_0")

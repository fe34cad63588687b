"""In-situ quantization by errors that an importance matrix weighs, through the public face."""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny
from native_weights import needs_library
from paged_sdk import (
    CheckpointError,
    ConfigError,
    GgufModelBuilder,
    IsqType,
    LayerTopology,
    Model,
    ModelLoadError,
    SamplingParams,
    TextModelBuilder,
    Topology,
    UnsupportedArchitectureError,
    write_gguf,
)
from paged_sdk.build.importance import load_importance
from paged_sdk.mistralrs import Runner, Which
from paged_sdk.weights.checkpoint import open_checkpoint
from paged_sdk.weights.importance import read_importance

pytestmark = [pytest.mark.anyio, needs_library]

TEXT = "the quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wide")
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    return tiny.make_checkpoint("llama", directory, dtype="bfloat16", **shape)


@pytest.fixture(scope="module")
def imatrix(checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("imatrix")
    write_gguf(checkpoint, directory / "m.gguf", type="Q4_0", calibrate=text, imatrix_out=directory / "m.imatrix.gguf")
    return directory / "m.imatrix.gguf"


def write_legacy(path: Path, entries: Mapping[str, Tensor]) -> Path:
    """Write llama.cpp's older form."""
    parts = [struct.pack("<i", len(entries))]
    for name, squares in entries.items():
        parts += [struct.pack("<i", len(name)), name.encode(), struct.pack("<ii", 1, squares.numel())]
        parts.append(squares.numpy().tobytes())
    path.write_bytes(b"".join(parts))
    return path


def builder_of(path: Path) -> TextModelBuilder:
    return TextModelBuilder(path).with_force_cpu().with_num_threads(1)


async def prompt_logprobs(model: Model) -> list[float]:
    sampling = SamplingParams(temperature=0, max_len=1, prompt_logprobs=0)
    response = await model.send_completion_request(list(range(5, 60)), sampling)
    assert response.prompt_logprobs is not None
    return [token.logprob for token in response.prompt_logprobs.content]


async def logprobs_of(builder: TextModelBuilder | GgufModelBuilder) -> list[float]:
    async with builder.build() as model:
        return await prompt_logprobs(model)


@pytest.mark.parametrize("isq", ["Q2K", "Q4K", "Q5_0"])
async def test_weights_are_those_of_a_file_that_is_quantized_by_it(
    isq: str, checkpoint: Path, imatrix: Path, tmp_path: Path
) -> None:
    wanted, blocks = IsqType.parse(isq), isq if "_" in isq else f"{isq[:2]}_K"
    ends = "Q6_K" if wanted.bits <= 4 else "Q8_0"
    file = write_gguf(
        checkpoint,
        tmp_path / "m.gguf",
        type="Q8_0",
        overrides=[("blk", blocks), ("token_embd|^output", ends)],
        imatrix=imatrix,
    )
    builder = builder_of(checkpoint).with_isq(wanted)
    weighted = await logprobs_of(builder.with_imatrix(imatrix))
    assert weighted == await logprobs_of(GgufModelBuilder(file).with_force_cpu().with_num_threads(1))
    assert weighted != await logprobs_of(builder)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "phi3", "gemma2", "starcoder2"])
async def test_every_way_to_store_matrices(family: str, text: Path, tmp_path: Path) -> None:
    if family == "starcoder2":
        path = tiny.make_other_checkpoint(family, tmp_path / "model", dtype="bfloat16")
    else:
        overrides = tiny.GGUF_OVERRIDES.get(family, {})
        path = tiny.make_checkpoint(family, tmp_path / "model", dtype="bfloat16", **overrides)
    kept = tmp_path / "imatrix.gguf"
    file = write_gguf(
        path,
        tmp_path / "m.gguf",
        type="Q4_0",
        overrides=[(r"attn_\w+\.", "Q4_0"), ("token_embd|^output", "Q8_0")],
        calibrate=text,
        imatrix_out=kept,
    )
    builder = builder_of(path).with_isq(IsqType.Q4_0)
    weighted = await logprobs_of(builder.with_imatrix(kept))
    assert weighted == await logprobs_of(GgufModelBuilder(file).with_force_cpu().with_num_threads(1))
    assert weighted != await logprobs_of(builder)
    # A GGUF file's matrices are found by the same names.
    exact = write_gguf(path, tmp_path / "exact.gguf", type="BF16")
    from_file = GgufModelBuilder(exact).with_force_cpu().with_num_threads(1).with_isq(IsqType.Q4_0)
    assert await logprobs_of(from_file.with_imatrix(kept)) == weighted


async def test_it_is_collected_before_weights_are_quantized(checkpoint: Path, imatrix: Path, text: Path) -> None:
    builder = builder_of(checkpoint).with_isq(IsqType.Q3K)
    collected = await logprobs_of(builder.with_calibration_file(text))
    assert collected == await logprobs_of(builder.with_imatrix(imatrix))
    assert collected != await logprobs_of(builder)


async def test_a_collection_ends_when_nobody_waits_for_it(checkpoint: Path, text: Path) -> None:
    opened, calls = open_checkpoint(checkpoint), 0

    def check_cancelled() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ModelLoadError("nobody waits")

    settings = builder_of(checkpoint).with_calibration_file(text).settings
    with pytest.raises(ModelLoadError, match="nobody waits"):
        load_importance(opened, settings, check_cancelled)
    opened.source.close()
    assert calls == 3  # while the model was loaded


async def test_a_live_model_keeps_it(checkpoint: Path, imatrix: Path, caplog: pytest.LogCaptureFixture) -> None:
    builder = builder_of(checkpoint).with_imatrix(imatrix)
    expected = await logprobs_of(builder.with_isq(IsqType.Q4K))
    unused = f"{imatrix.name} has no effect before re_isq_model is called"
    assert unused not in caplog.text
    async with builder.build() as model:
        assert unused in caplog.text
        as_it_is = await prompt_logprobs(model)
        assert as_it_is == await logprobs_of(builder_of(checkpoint))
        await model.re_isq_model(IsqType.Q4K)
        assert await prompt_logprobs(model) == expected


async def test_single_layers_are_weighted_too(checkpoint: Path, imatrix: Path) -> None:
    everywhere = Topology.empty().with_range(range(2), LayerTopology(isq=IsqType.Q4K))
    ends = everywhere.with_regex("embed_tokens|lm_head", LayerTopology(isq=IsqType.Q6K))
    builder = builder_of(checkpoint).with_imatrix(imatrix)
    by_layer = await logprobs_of(builder.with_topology(ends))
    assert by_layer == await logprobs_of(builder.with_isq(IsqType.Q4K))


async def test_types_of_groups_have_no_use_for_it(
    checkpoint: Path, imatrix: Path, caplog: pytest.LogCaptureFixture
) -> None:
    builder = builder_of(checkpoint).with_topology(Topology.empty().with_regex(".", LayerTopology(isq=IsqType.AFQ4)))
    with caplog.at_level(logging.WARNING, logger="paged_sdk"):
        assert await logprobs_of(builder.with_imatrix(imatrix)) == await logprobs_of(builder)
    assert "AFQ4 has no use for" in caplog.text


async def test_another_model_s_is_refused(checkpoint: Path, imatrix: Path, tmp_path: Path) -> None:
    found = read_importance(imatrix)
    entries = {name: found.means(name) for name in found.sums}
    others = {
        "blk.7.attn_q.weight' is not in this one": entries | {"blk.7.attn_q.weight": torch.ones(256)},
        "blk.1.ffn_down.weight' has 256 columns, expected 512": entries | {"blk.1.ffn_down.weight": torch.ones(256)},
        "it has no values for tensor 'blk.1.": {name: each for name, each in entries.items() if "blk.1." not in name},
    }
    for said, wrong in others.items():
        path = write_legacy(tmp_path / "foreign.dat", wrong)
        for builder in (builder_of(checkpoint).with_isq(IsqType.Q4K), builder_of(checkpoint)):
            with pytest.raises(CheckpointError, match=r"foreign\.dat is for another model") as caught:
                await builder.with_imatrix(path).build()
            assert said in str(caught.value)
    with pytest.raises(CheckpointError, match=r"none\.dat"):
        await builder_of(checkpoint).with_imatrix(tmp_path / "none.dat").build()
    with pytest.raises(ConfigError, match="with_calibration_file"):
        await builder_of(checkpoint).with_calibration_file(tmp_path / "none.txt").build()


async def test_a_family_that_llama_cpp_does_not_name(imatrix: Path, text: Path, tmp_path: Path) -> None:
    path = tiny.make_other_checkpoint("glm", tmp_path / "model")
    for builder in (builder_of(path).with_imatrix(imatrix), builder_of(path).with_calibration_file(text)):
        with pytest.raises(UnsupportedArchitectureError, match="no names for the tensors of a glm model"):
            await builder.build()


def test_one_of_both(imatrix: Path, text: Path) -> None:
    for builder in (
        lambda: TextModelBuilder("m").with_imatrix(imatrix).with_calibration_file(text),
        lambda: GgufModelBuilder("m.gguf").with_calibration_file(text).with_imatrix(imatrix),
    ):
        with pytest.raises(ConfigError, match="with_calibration_file"):
            builder()


def test_the_drop_in_takes_both(checkpoint: Path, imatrix: Path, text: Path) -> None:
    for which in (
        Which.Plain(str(checkpoint), imatrix=str(imatrix)),
        Which.Plain(str(checkpoint), calibration_file=str(text)),
        Which.GGUF(str(checkpoint), "m.gguf", imatrix=str(imatrix)),
    ):
        settings = which.builder().settings
        assert (settings.imatrix, settings.calibration_file) in ((imatrix, None), (None, text))
    foreign = Which.Plain(str(checkpoint), imatrix=str(text))
    with pytest.raises(CheckpointError, match="cannot be read as an importance matrix"):
        Runner(foreign, in_situ_quant="Q4K")

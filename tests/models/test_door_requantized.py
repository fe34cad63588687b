"""Models that run through transformers' classes are quantized again while they live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.tiny_classes import tiny_model

import tiny
from adapter_files import write_adapter
from native_weights import needs_library
from paged_sdk import BlockingModel, CheckpointError, IsqType, SamplingParams, TextModelBuilder
from paged_sdk.errors import shown
from paged_sdk.models.transformers_door.experts import load_own_experts
from tiny_encoder import make_encoder

pytestmark = needs_library

PROMPT = list(range(5, 40))


def builder(model_type: str, path: Path, **changes: Any) -> TextModelBuilder:
    model = tiny_model(model_type, vocab_size=tiny.VOCAB_SIZE, **changes)
    model.save_pretrained(path)
    tiny.tokenizer().save(str(path / "tokenizer.json"))
    return TextModelBuilder(path).with_dtype("float32").with_force_cpu().with_num_threads(1)


def logprobs(model: BlockingModel, adapter: str | None = None) -> list[float]:
    sampling = SamplingParams(temperature=0, max_len=1, prompt_logprobs=0)
    response = model.send_completion_request(PROMPT, sampling, adapter=adapter)
    assert response.prompt_logprobs is not None
    return [token.logprob for token in response.prompt_logprobs.content]


# Matrices with a row per input, and tied embeddings; experts that are SwiGLUs, and others.
@pytest.mark.parametrize("model_type", ["gpt2", "solar_open", "minimax_m3_vl_text"])
def test_the_model_is_the_one_that_a_builder_makes(model_type: str, tmp_path: Path) -> None:
    plain = builder(model_type, tmp_path)
    with BlockingModel(plain.build()) as model:
        first = logprobs(model)
        for isq in (IsqType.Q4_0, IsqType.AFQ8):
            model.re_isq_model(isq)
            again = logprobs(model)
            with BlockingModel(plain.with_isq(isq).build()) as fresh:
                assert again == logprobs(fresh) != first


def vector(model: BlockingModel) -> list[float]:
    return list(model.embed(["a small dog"]).embeddings[0])


def test_encoder(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    plain = TextModelBuilder(tmp_path).with_force_cpu().with_num_threads(1)
    with BlockingModel(plain.build()) as model, BlockingModel(plain.with_isq(IsqType.Q4_0).build()) as fresh:
        first = vector(model)
        model.re_isq_model(IsqType.Q4_0)
        assert vector(model) == vector(fresh) != first


def test_adapters_stay(tmp_path: Path) -> None:
    plain = builder("solar_open", tmp_path / "base")
    write_adapter(tmp_path / "tuned", tiny_model("solar_open"), targets=("q_proj", "o_proj", "down_proj"))
    plain = plain.with_adapter(tmp_path / "tuned")
    with BlockingModel(plain.build()) as model, BlockingModel(plain.with_isq(IsqType.Q4_0).build()) as fresh:
        model.re_isq_model(IsqType.Q4_0)
        assert logprobs(model, "tuned") == logprobs(fresh, "tuned") != logprobs(model)


@pytest.mark.parametrize("isq", [None, IsqType.Q8_0])
def test_what_fails_half_way_is_brought_back(
    isq: IsqType | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = builder("solar_open", tmp_path)
    plain = plain if isq is None else plain.with_isq(isq)
    calls: list[str] = []

    def failing(name: str, *args: Any) -> Any:
        calls.append(name)
        if len(calls) == 3:
            raise CheckpointError(f"no {shown(name)} today")
        return load_own_experts(name, *args)

    with BlockingModel(plain.build()) as model:
        before = logprobs(model)
        monkeypatch.setattr("paged_sdk.models.transformers_door.class_weights.load_own_experts", failing)
        with pytest.raises(CheckpointError, match="today"):
            model.re_isq_model(IsqType.Q4_0)
        assert len(calls) > 3
        assert logprobs(model) == before
        model.re_isq_model(IsqType.Q4_0)
        assert logprobs(model) != before


def test_changed_files_are_refused(tmp_path: Path) -> None:
    plain = builder("solar_open", tmp_path)
    with BlockingModel(plain.build()) as model:
        before = logprobs(model)
        tiny_model("solar_open", vocab_size=tiny.VOCAB_SIZE, hidden_size=32).save_pretrained(tmp_path)
        with pytest.raises(CheckpointError, match="build the model anew"):
            model.re_isq_model(IsqType.Q4_0)
        assert logprobs(model) == before

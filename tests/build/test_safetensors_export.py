"""Directories of safetensors that are written: transformers reads them and says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from paged_sdk import (
    BlockingModel,
    CheckpointError,
    ConfigError,
    SamplingParams,
    TextModelBuilder,
    UnsupportedArchitectureError,
    write_gguf,
    write_safetensors,
)
from paged_sdk.build.export import safetensors_plan
from paged_sdk.weights.checkpoint import open_checkpoint
from paged_sdk.weights.safetensors import writer as safetensors_writer
from quantized_writers import mlx, pack_checkpoint
from tiny import FAMILIES, make_checkpoint
from tiny_ranker import builder_of, logits_of, make_answering_ranker

PROMPT = list(range(3, 40))


def reference_tokens(directory: Path) -> list[int]:
    maker: Any = AutoModelForCausalLM  # it has no annotations
    model = maker.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        made = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=[], pad_token_id=0
        )
    return list(map(int, made[0, len(PROMPT) :]))


def own_tokens(path: Path) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_len=12, ignore_eos=True, top_n_logprobs=0)
    with BlockingModel(TextModelBuilder(path).with_dtype("float32").build()) as model:
        logprobs = model.send_completion_request(PROMPT, sampling).choices[0].logprobs
        assert logprobs is not None
        return [token.token_id for token in logprobs.content]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_says_the_same_of_a_decoded_gguf_file(family: str, tmp_path: Path) -> None:
    source = make_checkpoint(family, tmp_path / "source")
    if family in ("mistral", "mixtral", "gemma3_text", "qwen3_moe"):  # of which GGUF does not hold all
        target = write_safetensors(source, tmp_path / "target", type="F32")
        assert reference_tokens(target) == reference_tokens(source)
        return
    gguf = write_gguf(source, tmp_path / "model.gguf", type="Q8_0")
    target = write_safetensors(gguf, tmp_path / "target", type="F32")
    assert reference_tokens(target) == own_tokens(target) == own_tokens(gguf)
    tokenizers: Any = AutoTokenizer
    text = "Once upon a time <|im_start|>user"
    ours, theirs = (tokenizers.from_pretrained(each) for each in (target, source))
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    messages = [{"role": "user", "content": "Hello"}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)


def test_quantized_checkpoints_are_decoded(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source")
    quantized = write_gguf(source, tmp_path / "model.gguf", type="Q4_0")
    target = write_safetensors(quantized, tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    with safe_open(target / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_nothing_says_of_decoded_weights_that_they_are_quantized(tmp_path: Path) -> None:
    """MLX has a section of its own name, beside or in place of the usual one."""
    source = make_checkpoint("llama", tmp_path / "source")
    settings = {"group_size": 32, "bits": 4}
    pack_checkpoint(source, tmp_path / "packed", mlx, settings)
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    config |= {"quantization": settings, "quantization_config": settings, "torch_dtype": "float16"}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    target = write_safetensors(tmp_path / "packed", tmp_path / "target")
    written = json.loads((target / "config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert not {"quantization", "quantization_config", "torch_dtype"} & written.keys()
    checkpoint = open_checkpoint(target)
    checkpoint.source.close()
    assert not checkpoint.is_quantized


def test_what_is_written_ranks_texts_as_before(tmp_path: Path) -> None:
    make_answering_ranker("qwen3", tmp_path / "source", {"prompts": {"web": "Say it"}, "default_prompt_name": "web"})
    found = []
    for path in (tmp_path / "source", write_safetensors(tmp_path / "source", tmp_path / "target", type="F32")):
        with BlockingModel(builder_of(path).build()) as model:
            found.append(logits_of(model.rank("the sea", ["a ship", "x"])))
    assert found[0] == found[1]


def test_shards_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint("llama", tmp_path / "source")
    monkeypatch.setattr(
        safetensors_writer.write_shards, "__kwdefaults__", {"on_progress": None, "shard_bytes": 100_000}
    )
    target = write_safetensors(source, tmp_path / "target", type="F32")
    assert len(list(target.glob("model-*.safetensors"))) > 2
    assert reference_tokens(target) == reference_tokens(source) == own_tokens(target)


def test_what_is_refused_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint("llama", tmp_path / "source")
    with pytest.raises(ConfigError, match="nothing is yet"):
        write_safetensors(source, source)
    with pytest.raises(ConfigError, match="F32, F16, BF16"):
        write_safetensors(source, tmp_path / "target", type="Q4_K_M")
    scaled = make_checkpoint(
        "llama",
        tmp_path / "scaled",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    )
    gguf = write_gguf(scaled, tmp_path / "scaled.gguf", type="F32")
    with pytest.raises(UnsupportedArchitectureError, match="inv_freq_divisors"):
        write_safetensors(gguf, tmp_path / "target")
    written = safetensors_writer.write_shards

    def breaks(*args: Any, **options: Any) -> None:
        written(*args, **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_plan, "write_shards", breaks)
    before = set(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="No space left"):
        write_safetensors(source, tmp_path / "target")
    assert set(tmp_path.iterdir()) == before

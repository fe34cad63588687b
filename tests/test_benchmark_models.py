"""The models that are measured, as each engine gets them, and what of them is read for a token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmarks import random_gemma, random_llama, random_mixture, random_qwen
from benchmarks.bandwidth import bytes_per_token, read_bandwidth
from benchmarks.models import benchmark_model
from benchmarks.random_gemma import write_bfloat16
from benchmarks.random_gguf import RandomModel

import tiny
from paged_sdk import BlockingModel, GgufModelBuilder, SamplingParams, TextModelBuilder
from paged_sdk.weights.gguf.file import GgufFile

_SMALL_QWEN = {"_VOCAB_SIZE": 1024, "_LAYERS": 9, "_INNER": 512}
_SMALL_LLAMA = {"_VOCAB_SIZE": 1024, "_LAYERS": 8, "_HIDDEN": 256, "_INNER": 512, "_HEADS": 2, "_KV_HEADS": 1}
_SMALL_MIXTURE = {"_VOCAB_SIZE": 1024, "_LAYERS": 4, "_HIDDEN": 256, "_INNER": 256, "_EXPERTS": 10}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_each_engine_gets_the_form_that_it_reads(cache: Path) -> None:
    file = tiny.make_gguf(cache, quantization="Q8_0")
    quantized, dense = benchmark_model(str(file)), benchmark_model(f"{file}-f16")
    assert quantized.path_for(("gguf", "directory")) == file
    assert dense.path_for(("gguf",)) is None
    directories = [model.path_for(("directory",)) for model in (quantized, dense)]
    sampling = SamplingParams(temperature=0, max_len=4, ignore_eos=True)
    for directory, dtype in zip(directories, ("bfloat16", "float16"), strict=True):
        assert directory is not None
        assert directory.name.endswith(dtype)
        builder = TextModelBuilder(directory).with_dtype(dtype).with_force_cpu().with_num_threads(1)
        with BlockingModel(builder.build()) as model:
            assert model.send_completion_request("Once upon a time", sampling).usage.completion_tokens == 4
    assert dense.path_for(("gguf", "directory")) == directories[1]
    with pytest.raises(SystemExit, match="expected smollm2"):
        benchmark_model("nothing-bf16")


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_are_read_whole_only_where_they_are_the_output_too(tmp_path: Path, tied: bool) -> None:
    model = tiny.build_model("llama", tie_word_embeddings=tied)
    weights = sum(parameter.numel() for parameter in model.parameters())
    lookup = 0 if tied else tiny.VOCAB_SIZE * 64
    checkpoint = tiny.make_checkpoint("llama", tmp_path, tie_word_embeddings=tied)
    file = tiny.make_gguf(tmp_path, tie_word_embeddings=tied)
    assert bytes_per_token(checkpoint) == bytes_per_token(file) == 4 * (weights - lookup)


def test_of_a_mixture_a_token_reads_its_own_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in _SMALL_MIXTURE.items():
        monkeypatch.setattr(random_mixture, name, size)
    model, file = random_mixture.random_mixture(), tmp_path / "mixture.gguf"
    model.write_q4_k_m(file, tiny.make_gguf(tmp_path))
    bits = {"Q4_K": 144 * 8 / 256, "Q6_K": 210 * 8 / 256, "F32": 32}
    read: float = sum(4 * size for _, size, _ in model.vectors)
    for name, quantization, shape in model.matrices:
        used = (8, *shape[1:]) if len(shape) == 3 else shape
        read += 0 if name == "token_embd.weight" else prod(used) * bits[quantization] / 8
    assert bytes_per_token(file) == read


def test_the_bandwidth_is_a_rate() -> None:
    before = torch.get_num_threads()
    assert read_bandwidth(2, 1 << 20) > 1e6
    assert torch.get_num_threads() == before


def test_the_random_gemma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs, its weights have the size that keeps a product as large as its input, and bfloat16 is the same."""
    monkeypatch.setattr(random_gemma, "_VOCAB_SIZE", 1024)
    quantized, dense = tmp_path / "quantized.gguf", tmp_path / "dense.gguf"
    random_gemma.random_gemma().write_q4_k_m(quantized, tiny.make_gguf(tmp_path))
    write_bfloat16(dense, quantized)
    tensors, decoded = GgufFile(quantized).tensors, GgufFile(dense).tensors
    assert tensors.keys() == decoded.keys()
    assert len({tensor.type for tensor in tensors.values()}) == 5
    for name, tensor in tensors.items():
        values = tensor.decoded(torch.bfloat16)
        assert torch.equal(values, decoded[name].decoded(torch.bfloat16))
        if values.ndim == 2:
            assert values.float().std() * values.shape[1] ** 0.5 == pytest.approx(1, abs=0.03)
            assert abs(values.float().mean()) < 0.1 * values.float().std()
    for file in (quantized, dense):
        with BlockingModel(GgufModelBuilder(file).with_force_cpu().with_num_threads(1).build()) as model:
            response = model.send_completion_request([5, 6, 7], SamplingParams(temperature=0, max_len=3))
            assert response.usage.completion_tokens > 0


@pytest.mark.parametrize(
    ("module", "describe", "sizes"),
    [
        (random_qwen, random_qwen.random_qwen, _SMALL_QWEN),
        (random_llama, random_llama.random_llama, _SMALL_LLAMA),
        (random_mixture, random_mixture.random_mixture, _SMALL_MIXTURE),
    ],
    ids=["qwen", "llama", "mixture"],
)
def test_random_models_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    describe: Callable[[], RandomModel],
    sizes: Mapping[str, int],
) -> None:
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
    file = tmp_path / "random.gguf"
    describe().write_q4_k_m(file, tiny.make_gguf(tmp_path))
    tensors = GgufFile(file).tensors.values()
    assert {tensor.type for tensor in tensors} == {0, 12, 14}  # float32, Q4_K, Q6_K
    with BlockingModel(GgufModelBuilder(file).with_force_cpu().with_num_threads(1).build()) as model:
        response = model.send_completion_request([5, 6, 7], SamplingParams(temperature=0, max_len=3))
        assert response.usage.completion_tokens > 0

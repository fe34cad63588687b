"""Whole tiny models on the Triton backend and on repacked weights. Without CUDA, Triton's interpreter runs these, and
the layers around them take their way for the CPU unless tensors are said to be on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from reference_decoding import CPU, DictSource, greedy, ours, random_prompt, reference_greedy
from test_more_families import models
from torch import Tensor

pytest.importorskip("triton")

from paged_sdk import (
    BlockingModel,
    MemoryGpuConfig,
    PagedAttentionMeta,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.attention.triton_paged import TritonPagedBackend
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.loading import load_model
from paged_sdk.quant.forms.triton_blocks import TritonBlocks
from paged_sdk.quant.policy import DENSE, WeightPolicy
from paged_sdk.quant.triton_block import TritonBlockLinear
from paged_sdk.weights.gguf.source import GgufSource
from spans import span
from tiny import FAMILIES, build_model, make_gguf

NUM_TOKENS: Final = 4
NEEDS_GPU: Final = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
INTERPRETED: Final = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for CUDA here")

#: The interpreter takes seconds for what would be more; of head and embeddings there is one matrix.
TINIEST: Final[dict[str, Any]] = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
#: Two prompts that begin alike: the second finds a block of the first.
PROMPTS: Final = ("What is paging? It is", "What is paging? Nothing")
GREEDY: Final = SamplingParams(temperature=0.0, max_len=6, ignore_eos=True)
SMALL: Final = PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(512))


def texts(builder: TextModelBuilder) -> list[str]:
    """Return what a model makes of :data:`PROMPTS`, after each other and in chunks."""
    building = builder.with_paged_attn(SMALL).with_max_num_batched_tokens(13).build()
    with BlockingModel(building) as model:
        return [model.send_completion_request(prompt, sampling=GREEDY).choices[0].text for prompt in PROMPTS]


def logits_of(model: DecoderModel, text: Sequence[int]) -> Tensor:
    """Return all logits of a text, ``[num_tokens, vocab_size]``; on CUDA its attention is Triton's."""
    with torch.inference_mode():
        return model.logits(hidden_of(model, text)).cpu()


def hidden_of(model: DecoderModel, text: Sequence[int]) -> Tensor:
    """Return the same before the output projection, ``[num_tokens, hidden_size]``."""
    kind = TritonPagedBackend if model.device.type == "cuda" else PagedBackend
    backend = kind(model.config, PoolSettings(block_size=8, dtype=model.dtype, device=model.device), 8)
    with torch.inference_mode():
        context = StepContext(attention=backend.prepare([span(0, len(text), range(8))]))
        tokens, positions = torch.tensor(text), torch.arange(len(text))
        return model.forward(tokens.to(model.device), positions.to(model.device), context)


@INTERPRETED
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
@pytest.mark.usefixtures("triton_device")
def test_greedy_tokens_are_transformers(family: str) -> None:
    reference: Any = build_model(family)
    reference.set_attn_implementation("eager")
    prompt = random_prompt(19)

    def pool(model: DecoderModel) -> TritonPagedBackend:
        return TritonPagedBackend(model.config, PoolSettings(block_size=8, dtype=model.dtype, device=CPU), 8)

    expected = reference_greedy(reference, prompt, NUM_TOKENS)
    assert greedy(ours(reference), pool, prompt, NUM_TOKENS, chunk=11) == expected


@INTERPRETED
@pytest.mark.parametrize(
    "family",
    [*("deepseek_v3", "gemma4 31B"), *(pytest.param(each, marks=pytest.mark.long) for each in ("youtu", "gemma4 E2B"))],
)
@pytest.mark.usefixtures("triton_device")
def test_latent_vectors_and_layers_of_several_shapes(family: str) -> None:
    """Some of these attend over the keys of others."""
    reference, model = models(family)
    prompt = random_prompt(7)

    def pool(own: DecoderModel) -> TritonPagedBackend:
        return TritonPagedBackend(own.config, PoolSettings(block_size=8, dtype=own.dtype, device=CPU), 8)

    assert greedy(model, pool, prompt, 2, chunk=4) == reference_greedy(reference, prompt, 2)


class EverywhereTritonBlocks(TritonBlocks):
    """What is chosen for CUDA, on any device."""

    def is_for(self, device: torch.device) -> bool:
        return True


def everywhere_triton_blocks() -> WeightPolicy:
    return WeightPolicy(keep_blocks=True, forms=[EverywhereTritonBlocks()])


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_repacked_weights_are_the_files(family: str, tmp_path: Path, triton_device: torch.device) -> None:
    """Products in float32 of the very weights: nothing is lost but the last bits."""
    source = GgufSource(make_gguf(tmp_path, family=family, quantization="Q8_0", **TINIEST))

    def model(policy: WeightPolicy) -> DecoderModel:
        return load_model(source.config, source, dtype=torch.float32, placement=triton_device, policy=policy)

    dense, repacked = model(DENSE), model(everywhere_triton_blocks())
    assert all(isinstance(linear, TritonBlockLinear) for layer in repacked.layers for linear in layer.linears)
    assert isinstance(repacked.head, TritonBlockLinear)
    for length in (1, 5):  # one token's experts are multiplied one by one, those of several by tiles
        text = random_prompt(length)
        expected = logits_of(dense, text)
        assert (logits_of(repacked, text) - expected).norm() < 1e-4 * expected.norm()


@INTERPRETED
@pytest.mark.usefixtures("triton_device")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_way_for_cuda_gives_the_same_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms that add, activations, routing and experts by their kernels, attention by torch."""
    model, text = ours(build_model(family)), random_prompt(6)
    expected = logits_of(model, text)
    say_that_tensors_are_on_cuda(monkeypatch)
    assert (logits_of(model, text) - expected).norm() < 1e-4 * expected.norm()


@INTERPRETED
@pytest.mark.usefixtures("triton_device")
@pytest.mark.parametrize("num_tokens", [3, 6])
def test_the_way_for_cuda_on_repacked_weights(num_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up in one launch while tokens are few."""
    source = GgufSource(make_gguf(tmp_path, family="llama", quantization="Q8_0", **TINIEST))
    model = load_model(source.config, source, dtype=torch.float32, placement=CPU)
    policy = everywhere_triton_blocks()
    repacked = load_model(source.config, source, dtype=torch.float32, placement=CPU, policy=policy)
    text = random_prompt(num_tokens)
    expected = hidden_of(model, text)
    say_that_tensors_are_on_cuda(monkeypatch)
    assert (hidden_of(repacked, text) - expected).norm() < 1e-4 * expected.norm()


def say_that_tensors_are_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr("paged_sdk.kernels.triton.availability.why_not", lambda _: None)


@NEEDS_GPU
def test_text_on_cuda_is_the_cpus(tiny_checkpoint: Path) -> None:
    cpu, cuda = (
        texts(TextModelBuilder(tiny_checkpoint).with_dtype("float32").with_device(device)) for device in ("cpu", "cuda")
    )
    assert cuda == cpu


@NEEDS_GPU
@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_logits_on_cuda_are_the_cpus(family: str) -> None:
    """By the small fused ops too. The tolerance is that of tiny's sharp attention in float32."""
    source = DictSource(build_model(family).state_dict())
    config = build_model(family).config.to_dict()
    text = random_prompt(40)
    expected, got = (
        logits_of(load_model(config, source, dtype=torch.float32, placement=torch.device(name)), text)
        for name in ("cpu", "cuda")
    )
    assert (got - expected).norm() < 1e-3 * expected.norm()

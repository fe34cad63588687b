"""What keys are stored without: a bias that is far larger than what differs from key to key."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from reference_decoding import CPU, logits, ours, paged, random_prompt
from test_fused_decoder import Checkpoint, in_chunks
from torch import Tensor

from native_weights import needs_library, workspace
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.models import key_offsets as models_key_offsets
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.models.key_offsets import key_offsets
from tiny import build_model

LENGTH: Final = 300
NUM_BLOCKS: Final = 64


def with_large_bias(family: str = "qwen2") -> Any:
    """Transformers' model, its keys' bias in the pair that turns least, as Qwen2.5's is: 3e-4 radians a token."""
    reference: Any = build_model(family)
    for layer in reference.model.layers:
        bias = layer.self_attn.k_proj.bias.data
        bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(len(bias))))
        bias.view(2, 16)[:, [7, 15]] = torch.tensor([[1500.0, -1000.0], [-500.0, 1250.0]])
    return reference


def mean_of_rotated(bias: Tensor, first: int, theta: float) -> Tensor:
    """Of the 128 positions from ``first`` on, as complex numbers, in float64."""
    pairs = torch.complex(bias[:, :8].double(), bias[:, 8:].double())
    angles = torch.arange(first, first + 128)[:, None] * theta ** (-torch.arange(8.0).double() / 8)
    turned = (pairs * torch.polar(torch.ones(()).double(), angles)[:, None]).mean(0)
    return torch.cat((turned.real, turned.imag), 1)


@pytest.mark.parametrize("spans_at_once", [2, 256])
def test_the_mean_of_the_rotated_bias(spans_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_key_offsets, "_SPANS_AT_ONCE", spans_at_once)
    reference = with_large_bias()
    model = ours(reference)
    offsets = key_offsets(model, LENGTH)
    theta = model.config.ropes[0].theta
    assert [each.shape for each in offsets] == [(3, 2, 16)] * 2
    for layer, each in zip(reference.model.layers, offsets, strict=True):
        bias = layer.self_attn.k_proj.bias.view(2, 16)
        for span in range(3):
            expected = mean_of_rotated(bias, 128 * span, theta)
            torch.testing.assert_close(each[span].double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_keys_without_a_bias_are_stored_whole(family: str) -> None:
    assert key_offsets(ours(build_model(family)), LENGTH) == ()


def fp8(model: DecoderModel, offsets: tuple[Tensor, ...], *, native: bool) -> PagedBackend:
    settings = PoolSettings(
        block_size=16, dtype=model.dtype, device=CPU, cache_type=PagedCacheType.F8E4M3, key_offsets=offsets
    )
    if native:
        return NativePagedBackend(model.config, settings, NUM_BLOCKS, workspace=workspace())
    return PagedBackend(model.config, settings, NUM_BLOCKS)


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_library)], ids=["torch", "native"])
def test_a_bias_that_drowns_the_keys_is_no_loss(*, native: bool) -> None:
    """Two prompts in chunks and decodes; measured: 15 % of the logits' size, and 91 % with the keys stored whole."""
    model = ours(with_large_bias())
    prompts = [random_prompt(LENGTH, seed=seed) for seed in range(2)]
    tables = (range(19), range(19, 19 + 13))

    def outputs(backend: PagedBackend) -> Tensor:
        parts = []
        for (first, last), (other_first, other_last) in (
            ((0, 200), (0, 150)),
            ((200, 299), (150, 151)),
            ((299, 300), (151, 152)),
        ):
            rows = [
                (prompts[0][first:last], first, tables[0]),
                (prompts[1][other_first:other_last], other_first, tables[1]),
            ]
            parts += logits(model, backend, rows)
        return torch.cat(parts)

    backend = paged(16)(model)
    assert isinstance(backend, PagedBackend)
    exact = outputs(backend)

    def error(offsets: tuple[Tensor, ...]) -> float:
        got = outputs(fp8(model, offsets, native=native))
        return float((got - exact).square().mean().sqrt() / exact.square().mean().sqrt())

    assert error(key_offsets(model, LENGTH)) < 0.2
    assert error(()) > 0.8


@needs_library
@pytest.mark.parametrize("num_prompt_tokens", [0, LENGTH])
def test_fused_layers_write_and_read_them(num_prompt_tokens: int, tmp_path: Path) -> None:
    """Any vectors give the same attention, but for rounding: near the keys' own size, they add little to it."""
    checkpoint = Checkpoint(tmp_path, "qwen2")
    model, text = checkpoint.packed(), random_prompt(LENGTH)
    generator = torch.Generator().manual_seed(0)
    offsets = tuple(torch.randn(3, 2, 16, generator=generator) for _ in model.layers)

    def error(vectors: tuple[Tensor, ...]) -> float:
        backend = fp8(model, vectors, native=True)
        assert isinstance(backend, NativePagedBackend)
        fused = FusedDecoderModel(model, backend)
        got = in_chunks(fused, backend, text, (200, 240, 299), num_prompt_tokens=num_prompt_tokens)
        return checkpoint.error(got, text)

    assert error(offsets) < 2 * error(())

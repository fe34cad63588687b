"""Fused decoders of dense weights, of every native family, against the layer-by-layer model in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from reference_decoding import CPU, DictSource, logits, ours, paged, random_prompt
from torch import Tensor

from native_weights import needs_library, workspace
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.models.fusible import why_not_fused
from paged_sdk.quant.policy import WeightPolicy
from tiny import FAMILIES, build_model

pytestmark = needs_library

# tiny's own weights attend so sharply that any error decides what is seen; these leave errors near their size.
MILD: dict[str, Any] = {"initializer_range": 0.1}
EVERY_EXPERT = {"mixtral": {"num_experts_per_tok": 4}, "qwen3_moe": {"num_experts_per_tok": 8}}
# What rounding of keys, values and, for bfloat16, of every product's input does to logits.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 5e-2}


def fused(model: DecoderModel) -> tuple[FusedDecoderModel, NativePagedBackend]:
    settings = PoolSettings(block_size=16, dtype=model.dtype, device=CPU)
    backend = NativePagedBackend(model.config, settings, 64, workspace=workspace(num_threads=2))
    assert why_not_fused(model, backend) is None
    return FusedDecoderModel(model, backend), backend


def in_chunks(model: FusedDecoderModel, backend: NativePagedBackend, text: Sequence[int]) -> Tensor:
    """Return a text's logits, computed in parts of one row, few and many, beside a decode of another text."""
    parts, cuts = [], (40, 41, 46, len(text))
    for first, last in zip((0, *cuts), cuts, strict=False):
        rows = [([7], 0, [1]), (text[first:last], first, range(20, 40))]
        parts.append(logits(model, backend, rows)[1])
    return torch.cat(parts)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_family_is_fused_and_near_float32(family: str, dtype: torch.dtype) -> None:
    reference = build_model(family, **MILD | EVERY_EXPERT.get(family, {}))
    rounded = {name: tensor.to(dtype).float() for name, tensor in reference.state_dict().items()}
    reference.load_state_dict(rounded)
    text = random_prompt(100)
    expected = logits(exact := ours(reference), paged(16)(exact), [(text, 0, range(32))])[0]
    by_layers = logits(plain := ours(reference, dtype=dtype), paged(16)(plain), [(text, 0, range(32))])[0]
    model = ours(reference, dtype=dtype, policy=WeightPolicy(workspace=workspace(num_threads=2)))
    error = relative(in_chunks(*fused(model), text), expected)
    assert error < TOLERANCE[dtype]
    assert dtype == torch.float32 or error < 1.1 * relative(by_layers, expected)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_biases_of_every_matrix(dtype: torch.dtype) -> None:
    reference = build_model("llama", attention_bias=True, mlp_bias=True, **MILD)
    reference.load_state_dict({name: tensor.to(dtype).float() for name, tensor in reference.state_dict().items()})
    text = random_prompt(100)
    expected = logits(exact := ours(reference), paged(16)(exact), [(text, 0, range(32))])[0]
    model = ours(reference, dtype=dtype, policy=WeightPolicy(workspace=workspace(num_threads=2)))
    assert relative(in_chunks(*fused(model), text), expected) < TOLERANCE[dtype]


def test_tied_embeddings_and_head_share_their_memory() -> None:
    model = ours(build_model("llama", tie_word_embeddings=True), policy=WeightPolicy(workspace=workspace()))
    head = model.head.native_weights
    assert head is not None
    assert model.embedding.stored is not None
    assert head.few[0] is model.embedding.stored.weight  # type: ignore[attr-defined]


def test_float64_stays_with_torch() -> None:
    reference = build_model("llama")
    source = DictSource(reference.state_dict())
    model = ours(reference, dtype=torch.float64, policy=WeightPolicy(workspace=workspace()))
    assert all(linear.native_weights is None for layer in model.layers for linear in layer.linears)
    assert "lm_head.weight" in source

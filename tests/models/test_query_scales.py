"""Queries that grow with their position (Ministral 3), in fused layers: as transformers computes them, and as layers do
that run one operation at a time.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from attrs import evolve
from odd_configs import reference_of
from reference_decoding import CPU, DictSource, contiguous, logits, random_prompt
from torch import Tensor
from transformers import PreTrainedModel

from native_weights import needs_library, workspace
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.isq import IsqType
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.config.rope import RopeConfig
from paged_sdk.layers.rotary import RotaryEmbedding
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel, FusedLayers
from paged_sdk.models.fusible import why_not_fused
from paged_sdk.models.loading import load_model
from paged_sdk.models.spanned_decoder import SpannedDecoderModel
from paged_sdk.quant.policy import WeightPolicy

pytestmark = needs_library

_TRAINED: Final = 16
"""How many tokens a context had in training: the factors of later queries are above 1."""
PROMPT: Final = random_prompt(200)


@functools.cache
def reference(kind: str) -> PreTrainedModel:
    half = 16  # pages of 4-bit codes have heads of whole groups
    rope: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": _TRAINED,
        "llama_4_scaling_beta": 0.5,
    }
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * half, "long_factor": [1.0 + i for i in range(half)]}
    config = {
        "model_type": "ministral3",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2 * half,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "rope_parameters": rope,
    }
    with tempfile.TemporaryDirectory() as directory:
        return reference_of(config, Path(directory))


@functools.cache
def expected(kind: str = "yarn") -> Tensor:
    with torch.inference_mode():
        scores: Tensor = reference(kind)(torch.tensor([PROMPT])).logits[0]
    return scores


def packed(kind: str = "yarn", isq: IsqType | None = None, dtype: torch.dtype = torch.float32) -> DecoderModel:
    own = reference(kind)
    policy = WeightPolicy(isq=isq, workspace=workspace(num_threads=2))
    source = DictSource(own.state_dict())
    return load_model(own.config.to_dict(), source, dtype=dtype, placement=CPU, policy=policy)


def pool(model: DecoderModel, cache_type: PagedCacheType = PagedCacheType.AUTO) -> NativePagedBackend:
    settings = PoolSettings(block_size=16, dtype=model.dtype, device=CPU, cache_type=cache_type)
    backend = NativePagedBackend(model.config, settings, 64, workspace=workspace(num_threads=2))
    assert why_not_fused(model, backend) is None
    return backend


def in_chunks(model: Any, backend: NativePagedBackend) -> Tensor:
    """Return the prompt's logits, computed in parts beside another text; the last tokens count as generated."""
    return torch.cat(
        [
            logits(
                model,
                backend,
                [([7], first % 30, [7, 10]), (PROMPT[first:last], first, range(20, 40))],
                num_prompt_tokens={1: 150},
            )[1]
            for first, last in ((0, 40), (40, 41), (41, 148), (148, 198), (198, 199), (199, 200))
        ]
    )


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_as_transformers_has_it(kind: str) -> None:
    """Factors are made in the layers' call; with LongRoPE, whose angles depend on the text's length, before it."""
    model = packed(kind)
    backend = pool(model)
    native = FusedDecoderModel(model, backend)
    (whole,) = logits(native, backend, [(PROMPT, 0, range(20, 40))])
    assert (whole - expected(kind)).abs().max() < 1e-3 * expected(kind).abs().max()
    if kind == "yarn":
        got = in_chunks(native, backend)
        assert (got - expected(kind)).abs().max() < 1e-3 * expected(kind).abs().max()
    plain = packed(kind)
    plain.ropes.update({each: RotaryEmbedding(evolve(each, query_scale_beta=0.0), device=CPU) for each in plain.ropes})
    (without,) = logits(plain, contiguous(plain), [(PROMPT, 0, [0])])
    assert relative(without, expected(kind)) > 0.1


@pytest.mark.parametrize("isq", [IsqType.Q8_0, IsqType.Q4K, IsqType.AFQ4], ids=lambda each: each.name)
@pytest.mark.parametrize("cache_type", list(PagedCacheType), ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantized_weights_and_pages(isq: IsqType, cache_type: PagedCacheType, dtype: torch.dtype) -> None:
    """As far from the exact logits as layers are that run one operation at a time; in float32 nearly the same, but for
    numbers on a rounding boundary.
    """
    model = packed(isq=isq, dtype=dtype)
    backend = pool(model, cache_type)
    got = in_chunks(FusedDecoderModel(model, backend), backend)
    one_by_one = in_chunks(model, pool(model, cache_type))
    exact = expected()
    assert relative(got, one_by_one) < (4e-2 if dtype == torch.float32 else relative(one_by_one, exact))
    assert relative(got, exact) < 1.2 * relative(one_by_one, exact)


@pytest.mark.parametrize("cache_type", list(PagedCacheType), ids=lambda each: each.name)
def test_a_token_depends_on_no_chunk(cache_type: PagedCacheType) -> None:
    """Bit by bit, whichever pages hold its keys."""
    model = packed(isq=IsqType.Q8_0, dtype=torch.bfloat16)
    backend = pool(model, cache_type)
    native = FusedDecoderModel(model, backend)
    (whole,) = logits(native, backend, [(PROMPT, 0, range(40, 60))], num_prompt_tokens={0: 150})
    assert torch.equal(in_chunks(native, backend), whole)


def test_a_span_of_layers() -> None:
    """Beside spans on other devices, it is given the factors that these read."""
    model = packed()
    backend = pool(model)
    pages = backend.native_pages
    assert pages is not None
    spanned = SpannedDecoderModel(model, {0: FusedLayers(model, pages, range(3))})
    (got,) = logits(spanned, backend, [(PROMPT, 0, range(20, 40))])
    assert (got - expected()).abs().max() < 1e-3 * expected().abs().max()


def test_factors_are_torch_s_to_two_roundings() -> None:
    """Of those that the layers' call makes, which rounds logarithms once, as a test of it says."""
    rope = RopeConfig(rotary_dim=2, original_max_position=3, query_scale_beta=0.1)
    positions = torch.arange(300_000)
    scales = RotaryEmbedding(rope, device=CPU).at(positions).query_scale
    assert scales is not None
    made = 1 + 0.1 * (positions // 3).double().log1p().float()
    assert ((scales - made).abs() <= 2 * torch.finfo(torch.float32).eps * made).all()

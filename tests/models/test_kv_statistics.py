"""What is measured of keys and queries, against transformers' own projections."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from reference_decoding import CPU, logits, ours, paged, random_prompt
from torch import Tensor
from transformers import AutoModelForCausalLM

from native_weights import needs_library, workspace
from paged_sdk import ModelLoadError, PagedAttentionMeta, PagedCacheType, TextModelBuilder
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.build.assembly import load_parts
from paged_sdk.build.kv_statistics import KvStatistics, measure_kv
from paged_sdk.config.env import read_environment
from paged_sdk.models.decoder import DecoderModel
from test_recurrent_models import CONFIGS as RECURRENT
from tiny import build_model, make_checkpoint, make_other_checkpoint

LENGTH: Final = 300
NUM_TOKENS: Final = 128
THETA: Final = 1e4
SIZES: Final[dict[str, Any]] = {"hidden_size": 128, "head_dim": 32}


def measured(model: DecoderModel, max_model_len: int = LENGTH) -> KvStatistics:
    return measure_kv(model, max_model_len, num_threads=1)


def turned(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotate ``[num_tokens, heads, 32]`` in float64."""
    pairs = torch.complex(heads[..., :16].double(), heads[..., 16:].double())
    angles = positions[:, None] * THETA ** (-torch.arange(16.0).double() / 16)
    rotated = pairs * torch.polar(torch.ones(()).double(), angles)[:, None]
    return torch.cat((rotated.real, rotated.imag), -1)


def projections(reference: Any) -> list[tuple[Tensor, Tensor]]:
    """Return queries and keys of the random tokens, which start the generator's sequence."""
    tokens = torch.randint(reference.config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    found: dict[tuple[int, str], Tensor] = {}
    for index, layer in enumerate(reference.model.layers):
        for name in ("q_proj", "k_proj"):
            getattr(layer.self_attn, name).register_forward_hook(
                lambda module, args, output, place=(index, name): found.update({place: output[0]})
            )
    with torch.no_grad():
        reference(tokens[None])
    return [
        (found[index, "q_proj"].view(NUM_TOKENS, -1, 32), found[index, "k_proj"].view(NUM_TOKENS, -1, 32))
        for index in range(len(reference.model.layers))
    ]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_mean_key_and_how_much_larger_queries_are(family: str) -> None:
    """Of all tokens but the first."""
    reference: Any = build_model(family, **SIZES, rope_theta=THETA)
    found = measured(ours(reference))
    assert len(found.key_offsets) == len(found.bases) == 2
    for (query, key), offsets, basis in zip(projections(reference), found.key_offsets, found.bases, strict=True):
        assert offsets.shape == (3, 2, 32)
        mean = key[1:].double().mean(0)
        for span in range(3):
            expected = turned(mean.expand(128, -1, -1), torch.arange(128 * span, 128 * span + 128)).mean(0)
            torch.testing.assert_close(offsets[span].double(), expected, rtol=0, atol=1e-4)
        positions = torch.arange(1, NUM_TOKENS)
        stored = turned(key[1:], positions) - offsets[0].double()
        queries = torch.unflatten(turned(query[1:], positions), 1, (2, 2))  # two query heads per KV head
        factors = (queries.square().mean((0, 2)) / stored.square().mean(0)) ** 0.25
        torch.testing.assert_close(basis.factors.double(), factors, rtol=1e-3, atol=0)
        balanced = stored * basis.factors, queries / basis.factors.double()[:, None]
        torch.testing.assert_close(balanced[0].square().mean(0), balanced[1].square().mean((0, 2)), rtol=1e-3, atol=0)


def test_the_same_weights_show_the_same() -> None:
    model = ours(build_model("llama", **SIZES))
    first, second = measured(model), measured(model)
    for one, other in zip(first.key_offsets, second.key_offsets, strict=True):
        assert torch.equal(one, other)
    for basis, again in zip(first.bases, second.bases, strict=True):
        assert torch.equal(basis.factors, again.factors)


@pytest.mark.parametrize("length", [1, 2, 100])
def test_contexts_shorter_than_the_prompt(length: int) -> None:
    found = measured(ours(build_model("qwen3", **SIZES)), length)
    assert all(offsets.shape == (1, 2, 32) and bool(offsets.isfinite().all()) for offsets in found.key_offsets)
    assert all(bool((basis.factors > 0).all() and basis.factors.isfinite().all()) for basis in found.bases)


def test_activations_that_are_not_finite_show_nothing() -> None:
    reference: Any = build_model("llama", **SIZES)
    reference.model.layers[1].self_attn.k_proj.weight.data[0, 0] = torch.inf
    found = measured(ours(reference))
    assert found.key_offsets[0].any()
    assert not found.key_offsets[1].any()
    assert torch.equal(found.bases[1].factors, torch.ones(2, 32))


def test_layers_without_attention_are_left_out(tmp_path: Path) -> None:
    checkpoint = make_other_checkpoint("lfm2", tmp_path, **RECURRENT["lfm2"], **SIZES)
    model = ours(AutoModelForCausalLM.from_pretrained(checkpoint))
    found = measured(model)
    assert len(found.key_offsets) == len(found.bases) == len(model.config.attention_layers) == 1


def with_large_bias() -> Any:
    """Transformers' model, its keys' bias in the pair that turns least, as Qwen2.5's is: 2e-4 radians a token."""
    reference: Any = build_model("qwen2", **SIZES)
    for layer in reference.model.layers:
        bias = layer.self_attn.k_proj.bias.data
        bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(len(bias))))
        bias.view(2, 32)[:, [15, 31]] = torch.tensor([[300.0, -200.0], [-100.0, 250.0]])
    return reference


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_library)], ids=["torch", "native"])
def test_a_bias_that_drowns_the_keys_is_no_loss(*, native: bool) -> None:
    """Measured: 54 % of the logits' size, as much as a tiny random model loses by 4 bits, and 138 % with the keys
    stored whole.
    """
    model, prompt = ours(with_large_bias()), random_prompt(LENGTH)
    found = measured(model)
    exact_pool = paged(16)(model)

    def outputs(backend: Any) -> Tensor:
        parts = [(0, 200), (200, 299), (299, 300)]
        return torch.cat([logits(model, backend, [(prompt[first:last], first, range(19))])[0] for first, last in parts])

    def q4(offsets: tuple[Tensor, ...], bases: Any) -> PagedBackend:
        settings = PoolSettings(
            block_size=16,
            dtype=model.dtype,
            device=CPU,
            cache_type=PagedCacheType.Q4,
            key_offsets=offsets,
            bases=bases,
        )
        if native:
            return NativePagedBackend(model.config, settings, 20, workspace=workspace())
        return PagedBackend(model.config, settings, 20)

    exact = outputs(exact_pool)

    def error(offsets: tuple[Tensor, ...], bases: Any = ()) -> float:
        got = outputs(q4(offsets, bases))
        return float((got - exact).square().mean().sqrt() / exact.square().mean().sqrt())

    assert error(found.offsets_in_bases, found.bases) < 0.6
    assert error(()) > 1.2


def test_who_gives_up_loading_does_not_wait_for_the_measuring(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    builder = TextModelBuilder(path).with_force_cpu().with_num_threads(1)
    builder = builder.with_paged_attn(PagedAttentionMeta(cache_type=PagedCacheType.F8E4M3))
    num_asked = 0

    def check_cancelled() -> None:
        nonlocal num_asked
        if threading.current_thread().name.startswith("paged-sdk trial"):
            num_asked += 1
            if num_asked == 2:
                raise ModelLoadError("given up")

    with pytest.raises(ModelLoadError, match="given up"):
        load_parts(builder.source, builder.settings, read_environment({}), check_cancelled=check_cancelled)
    assert num_asked == 2

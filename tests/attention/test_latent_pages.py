"""Pages whose keys are the values, too, as of latent attention: every backend, against attention written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
import torch
from attrs import evolve
from naive_attention import CPU, Text, naive_attention, shape
from test_backends import LENGTHS, STEPS, TOLERANCE, make_backend, poisoned, run, tables
from test_native_paged import NATIVE_DTYPES, attended, native
from torch import Tensor

from native_weights import needs_library
from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.attention.contiguous import ContiguousBackend
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.latent_attention import LatentAttentionConfig
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.config.rope import RopeConfig
from paged_sdk.kernels.attention_inputs import LayerCache, Precision
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.layers.rotary import RotaryEmbedding
from spans import span

#: A prompt beside a decode, decodes alone, and a chunk beside drafts and a text's first token.
SHORT_STEPS: Final[tuple[dict[int, int], ...]] = ({0: 7, 1: 1}, {1: 1, 0: 1}, {0: 2, 1: 4, 2: 1})


def latent_shape(*, num_heads: int = 4, rank: int = 48, num_layers: int = 1) -> DecoderConfig:
    """Describe a decoder with latent attention, of which only the attention is used."""
    latent = LatentAttentionConfig(rank=rank, rope_dim=16, nope_dim=16, value_dim=16)
    plain = shape(num_heads=num_heads, num_kv_heads=1, head_dim=latent.key_dim, windows=(None,) * num_layers)
    return evolve(plain, latent=latent)


class LatentText(Text):
    """Holds a sequence whose keys are its values."""

    def __init__(self, config: DecoderConfig, length: int, *, seed: int, dtype: torch.dtype, spread: float = 3) -> None:
        super().__init__(config, length, seed=seed, dtype=dtype, spread=spread)
        self.value = self.key
        self.expected = torch.stack(
            [naive_attention(config, layer, self.query[layer], key, key) for layer, key in enumerate(self.key)]
        )


def texts(config: DecoderConfig, dtype: torch.dtype) -> list[LatentText]:
    return [LatentText(config, length, seed=length, dtype=dtype) for length in LENGTHS]


@pytest.mark.parametrize("block_size", [7, 16])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_torchs_pages(dtype: torch.dtype, block_size: int) -> None:
    config = latent_shape(num_layers=2)
    backend, own = poisoned(config, block_size, dtype), texts(config, dtype)
    assert max(run(backend, own, step, tables(block_size)) for step in STEPS) < TOLERANCE[dtype]


def test_contiguous_keys() -> None:
    config = latent_shape(num_layers=2)
    (backend, kv_ids), own = make_backend(config, paged=False), texts(config, torch.float64)
    assert max(run(backend, own, step, kv_ids) for step in STEPS) < 1e-12


@needs_library
@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize(("num_heads", "rank"), [(4, 48), (16, 512), (20, 48), (1, 64)])
def test_native_pages(num_heads: int, rank: int, dtype: torch.dtype) -> None:
    config = latent_shape(num_heads=num_heads, rank=rank)
    backend, own = native(config, dtype=dtype), texts(config, dtype)
    assert max(run(backend, own, step, tables(16)) for step in STEPS) < TOLERANCE[dtype]


@pytest.mark.parametrize(("num_heads", "cache_type"), [(20, PagedCacheType.AUTO), (2, PagedCacheType.F8E4M3)])
def test_tritons_pages(num_heads: int, cache_type: PagedCacheType, triton_device: torch.device) -> None:
    """Against torch's pages, rotated in the same launch as they are written: mixed steps, and a copied block."""
    triton_paged = pytest.importorskip("paged_sdk.attention.triton_paged")
    config, rotated = latent_shape(num_heads=num_heads), 16
    own = texts(config, torch.float32)
    rope = RotaryEmbedding(RopeConfig(rotary_dim=rotated), device=CPU)

    def outputs(kind: type[PagedBackend], device: torch.device) -> list[Tensor]:
        settings = PoolSettings(block_size=16, dtype=torch.float32, device=device, cache_type=cache_type)
        backend = kind(config, settings, 257)
        for tensor in backend.block_tensors:
            tensor.copy_(torch.full(tensor.shape, torch.nan))
        computed, blocks, found = [0] * len(own), tables(16), []
        for step in SHORT_STEPS:
            spans = [span(computed[i], count, blocks[i]) for i, count in step.items()]
            positions = torch.cat([torch.arange(each.start, each.end) for each in spans])
            query_key = torch.cat(
                [
                    torch.cat((own[i].query[0], own[i].key[0]), 1)[s.start : s.end]
                    for i, s in zip(step, spans, strict=True)
                ]
            ).to(device)
            at = rope.at(positions)
            rotation = Rotation(at.cosines.to(device), at.sines.to(device))
            output = backend.prepare(spans).rotate_and_forward(0, query_key, query_key[:, -1:], rotation)
            found.append(output[..., rotated:].cpu())
            for i, count in step.items():
                computed[i] += count
            if blocks[0][0] != 256:
                backend.copy([(blocks[0][0], 256, 16)])
                blocks[0][0] = 256
        return found

    expected = outputs(PagedBackend, CPU)
    for got, other in zip(outputs(triton_paged.TritonPagedBackend, triton_device), expected, strict=True):
        torch.testing.assert_close(got, other, rtol=0, atol=TOLERANCE[torch.float32])


def generated(backend: AttentionBackend, text: LatentText, cuts: Sequence[int], blocks: Sequence[int]) -> Tensor:
    """Return what tokens attend to that were generated, or guessed, some at a time."""
    parts, first = [], 0
    for count in cuts:
        tokens = slice(first, first + count)
        step = backend.prepare([span(first, count, blocks, num_prompt_tokens=0)])
        parts.append(step.forward(0, text.query[0, tokens], text.key[0, tokens], text.value[0, tokens]))
        first += count
    return torch.cat(parts)


@needs_library
@pytest.mark.parametrize("precision", [Precision.BFLOAT16, Precision.INT8])
@pytest.mark.parametrize("num_heads", [4, 16])
def test_a_generated_token_has_the_same_bits_alone_and_among_drafts(num_heads: int, precision: Precision) -> None:
    """However many heads there are: from some number on, keys are packed for them."""
    config = latent_shape(num_heads=num_heads)
    text = LatentText(config, 300, seed=1, dtype=torch.bfloat16)
    backend = native(config, dtype=torch.bfloat16, precision=precision)
    alone, among = ([1] * 300, range(19)), ([5] * 60, range(20, 39))
    expected, got = (generated(backend, text, *each) for each in (alone, among))
    assert torch.equal(got, expected)
    error = (expected.double() - text.expected[0]).norm() / text.expected[0].norm()
    assert 0 < error < 2.0**-7


@needs_library
@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_8_bit_keys_are_those_of_torch(dtype: torch.dtype) -> None:
    config, kind = latent_shape(num_heads=16), PagedCacheType.F8E4M3
    own = texts(config, dtype)
    settings = PoolSettings(block_size=16, dtype=dtype, device=CPU, cache_type=kind)
    made = attended(native(config, dtype=dtype, cache_type=kind), own, STEPS, tables(16))
    expected = attended(PagedBackend(config, settings, 256), own, STEPS, tables(16))
    for got, other, text in zip(made, expected, own, strict=True):
        torch.testing.assert_close(got, other, rtol=0, atol=TOLERANCE[dtype])
        error = (other.double() - text.expected[0]).norm() / text.expected[0].norm()
        assert 1e-3 < error < 0.1


@pytest.mark.parametrize("cache_type", [PagedCacheType.AUTO, PagedCacheType.F8E4M3])
def test_a_pool_has_one_vector_per_token_and_layer(cache_type: PagedCacheType) -> None:
    config = latent_shape(num_layers=3)
    settings = PoolSettings(block_size=16, dtype=torch.bfloat16, device=CPU, cache_type=cache_type)
    backend = PagedBackend(config, settings, 8)
    per_vector = {PagedCacheType.AUTO: 64 * 2, PagedCacheType.F8E4M3: 64 + 4}[cache_type]
    assert config.kv_elements_per_token == 3 * 64
    assert config.kv_vectors_per_token == 3
    assert backend.num_bytes == 8 * 16 * 3 * per_vector
    assert len(backend.block_tensors) == 3 * (1 if cache_type is PagedCacheType.AUTO else 2)


def test_copied_blocks_and_slots_are_whole() -> None:
    config = latent_shape()
    paged, contiguous = poisoned(config, 16, torch.float64), ContiguousBackend(config, dtype=torch.float64, device=CPU)
    for backend, first, second in ((paged, [3, 4], [5, 6]), (contiguous, [0], [1])):
        (text,) = (LatentText(config, 30, seed=1, dtype=torch.float64),)
        assert run(backend, [text], {0: 20}, [first]) < 1e-12
        num_tokens = 16 if backend is paged else 20
        backend.copy([(source, target, num_tokens) for source, target in zip(first, second, strict=True)])
        backend.release(first)
        assert run(backend, [text], {0: 10}, [second]) < 1e-12


def test_keys_that_are_values_are_one_tensor() -> None:
    key = torch.zeros(4, 16, 1, 64)
    assert LayerCache(key, key).values_are_keys
    assert not LayerCache(key, key.clone()).values_are_keys
    assert len(LayerCache(key, key).tensors) == 1

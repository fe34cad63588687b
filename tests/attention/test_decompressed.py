"""Prompts over keys and values decompressed from latent vectors, beside decodes that are not, against attention of
heads written out in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from naive_attention import CPU, naive_attention, shape
from test_native_paged import NATIVE_DTYPES, native
from torch import Tensor

from native_weights import needs_library, workspace
from paged_sdk.attention import decompressed
from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.attention.decompressed import pays_to_decompress
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.latent_attention import LatentAttentionConfig
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kernels.attention_inputs import Precision
from paged_sdk.kernels.latent_heads import LatentHeads
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.quant.form import Place
from paged_sdk.quant.latent_heads import make_latent_heads
from spans import span

HEADS = 5
SIZES = LatentAttentionConfig(rank=64, rope_dim=16, nope_dim=32, value_dim=32)
LITE = LatentAttentionConfig(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# Each step's tokens per sequence: a prompt, a chunk beside a decode, short chunks beside one another.
STEPS: Sequence[dict[int, int]] = ({0: 90}, {0: 1, 1: 64, 2: 40}, {1: 100, 0: 1, 2: 3}, {2: 1, 1: 1, 0: 1})
LENGTHS = (93, 165, 44)
PROMPTS = (90, 164, 43)


def config() -> DecoderConfig:
    plain = shape(num_heads=HEADS, num_kv_heads=1, head_dim=SIZES.key_dim)
    return evolve(plain, latent=SIZES, attention_scale=SIZES.query_dim**-0.5)


def projections() -> Tensor:
    height = SIZES.nope_dim + SIZES.value_dim
    return torch.randn(HEADS * height, SIZES.rank, generator=torch.Generator().manual_seed(5)) / 8


def latent_heads(dtype: torch.dtype) -> LatentHeads:
    there = Place(device=CPU, dtype=dtype, workspace=workspace(), one_form=False)
    return make_latent_heads(projections(), SIZES, there, is_quantized=False)


def rotation_at(positions: Tensor) -> Rotation:
    angles = positions[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 3e-4])
    return Rotation(angles.cos(), angles.sin())


class LatentText:
    """Holds a sequence's queries and keys before they are rotated, and what each head's tokens attend to."""

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(length)
        self.query = torch.randn(length, HEADS, SIZES.query_dim, generator=generator).to(dtype)
        self.key = torch.randn(length, SIZES.key_dim, generator=generator).to(dtype)
        query, key = self.query.double(), self.key[:, None].double()
        rotation = rotation_at(torch.arange(length))
        for heads in (query, key):
            rotation.rotate_(heads)
        up = torch.unflatten(projections().to(dtype).double(), 0, (HEADS, -1))
        both = torch.einsum("nr,hdr->nhd", key[:, 0, SIZES.rope_dim :], up)
        keys = torch.cat([key[..., : SIZES.rope_dim].expand(-1, HEADS, -1), both[..., : SIZES.nope_dim]], -1)
        of_heads = evolve(config(), latent=None, num_kv_heads=HEADS, head_dim=SIZES.query_dim)
        values = F.pad(both[..., SIZES.nope_dim :], (0, SIZES.query_dim - SIZES.value_dim))
        self.expected = naive_attention(of_heads, 0, query, keys, values)[..., : SIZES.value_dim]


def texts(dtype: torch.dtype) -> list[LatentText]:
    return [LatentText(length, dtype) for length in LENGTHS]


def attended(backend: AttentionBackend, own: Sequence[LatentText], heads: LatentHeads) -> list[Tensor]:
    """Return what every token attends to, in the steps."""
    computed, parts = [0] * len(own), [[] for _ in own]  # type: tuple[list[int], list[list[Tensor]]]
    for step in STEPS:
        rows = [
            span(computed[i], count, range(i * 16, i * 16 + 16), num_prompt_tokens=PROMPTS[i])
            for i, count in step.items()
        ]
        at = [(own[i], slice(row.start, row.end)) for i, row in zip(step, rows, strict=True)]
        query, key = torch.cat([text.query[s] for text, s in at]), torch.cat([text.key[s] for text, s in at])
        rotation = rotation_at(torch.cat([torch.arange(s.start, s.stop) for _, s in at]))
        rotated, unrotated = query[..., : SIZES.rope_dim].clone(), query[..., SIZES.rope_dim :]
        out = backend.prepare(rows).attend_over_latents(0, rotated, unrotated, key, heads, rotation)
        for i, part in zip(step, torch.split(out, list(step.values())), strict=True):
            parts[i].append(part)
            computed[i] += len(part)
    return [torch.cat(each) for each in parts]


def errors(backend: AttentionBackend, dtype: torch.dtype) -> list[float]:
    own = texts(dtype)
    got = attended(backend, own, latent_heads(dtype))
    return [float((each.double() - text.expected).abs().max()) for each, text in zip(got, own, strict=True)]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """List the prompts that are decompressed, by their tokens and their keys."""
    found: list[tuple[int, int]] = []
    attend = decompressed.DecompressedHeads.attend

    def counted(self: decompressed.DecompressedHeads, row: decompressed.DecompressedRow, *rest: object) -> None:
        found.append((row.last - row.first, len(row.slots)))
        attend(self, row, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(decompressed.DecompressedHeads, "attend", counted)
    return found


CHOSEN = [(90, 90), (64, 64), (40, 40), (100, 164)]


@needs_library
@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize(("most_bytes", "at_once"), [(1 << 20, 4096), (1, 48), (150_000, 50)])
def test_mixed_steps(
    dtype: torch.dtype, most_bytes: int, at_once: int, chosen: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many heads and keys are decompressed at a time."""
    monkeypatch.setattr(decompressed, "MOST_DECOMPRESSED", most_bytes)
    monkeypatch.setattr(decompressed, "_KEYS_AT_ONCE", at_once)
    assert max(errors(native(config(), dtype=dtype), dtype)) < TOLERANCE[dtype]
    assert chosen == CHOSEN


@needs_library
@pytest.mark.parametrize("precision", [Precision.BFLOAT16, Precision.INT8])
def test_rounded_products(precision: Precision, chosen: list[tuple[int, int]]) -> None:
    found = errors(native(config(), dtype=torch.bfloat16, precision=precision), torch.bfloat16)
    assert max(found) < 2 * TOLERANCE[torch.bfloat16]
    assert chosen == CHOSEN


@needs_library
def test_both_ways_agree_on_8_bit_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decompressed are the vectors as the pages hold them."""
    own, heads, found = texts(torch.float32), latent_heads(torch.float32), []
    for fewest in (32, 1 << 20):
        monkeypatch.setattr(decompressed, "_FEWEST_TOKENS", fewest)
        backend = native(config(), dtype=torch.float32, cache_type=PagedCacheType.F8E4M3)
        found.append(attended(backend, own, heads))
    for one, other, text in zip(*found, own, strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
        assert float((one.double() - text.expected).abs().max()) > 1e-3


@needs_library
def test_projections_that_torch_multiplies_are_absorbed(chosen: list[tuple[int, int]]) -> None:
    there = Place(device=CPU, dtype=torch.float32, workspace=None, one_form=False)
    heads, own = make_latent_heads(projections(), SIZES, there, is_quantized=False), texts(torch.float32)
    for got, text in zip(attended(native(config(), dtype=torch.float32), own, heads), own, strict=True):
        assert float((got.double() - text.expected).abs().max()) < 1e-5
    assert not chosen


@pytest.mark.parametrize("sizes", [SIZES, LITE])
def test_when_it_pays(sizes: LatentAttentionConfig) -> None:
    """A first chunk pays from its least length on, and later ones from some number of tokens on; single tokens never
    do.
    """
    assert not pays_to_decompress(sizes, 1, 1)
    assert not pays_to_decompress(sizes, 1, 100_000)
    assert [pays_to_decompress(sizes, count, count) for count in (31, 32, 512)] == [False, True, True]
    for context_len in (1000, 100_000):
        pays = [pays_to_decompress(sizes, count, context_len) for count in range(1, 600)]
        assert pays == sorted(pays)
        assert pays[-1]
    fewest = next(count for count in range(1, 600) if pays_to_decompress(LITE, count, 100_000))
    assert 300 < fewest < 400

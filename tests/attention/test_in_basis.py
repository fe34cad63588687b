"""Attention over pages in a basis of their own."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from naive_attention import CPU, Text, shape

from native_weights import needs_library, workspace
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kernels.hadamard import hadamard_transform
from paged_sdk.kernels.kv_basis import KvBasis
from spans import span


def bases(count: int, head_dim: int) -> tuple[KvBasis, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(KvBasis(torch.randn(2, head_dim, generator=generator).exp()) for _ in range(count))


@pytest.mark.parametrize("head_dim", [32, 48, 96])
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_library)], ids=["torch", "native"])
def test_any_basis_gives_the_same_attention(head_dim: int, *, native: bool) -> None:
    """Pages that lose nothing; with factors from 1/10 to 10, rounding to float32 adds some 1e-5."""
    config = shape(head_dim=head_dim, windows=(None, 60), softcap=20)
    settings = PoolSettings(block_size=16, dtype=torch.float32, device=CPU, bases=bases(2, head_dim))
    if native:
        backend: PagedBackend = NativePagedBackend(config, settings, 8, workspace=workspace())
    else:
        backend = PagedBackend(config, settings, 8)
    text = Text(config, 120, seed=0, dtype=torch.float32, spread=1)
    for first, last in ((0, 70), (70, 119), (119, 120)):
        step = backend.prepare([span(first, last - first, [7, 2, 5, 1, 3, 0, 6, 4])])
        assert (step.native_rows is not None) is native
        for layer in range(2):
            query, key, value = (each[layer, first:last] for each in (text.query, text.key, text.value))
            expected = text.expected[layer, first:last]
            torch.testing.assert_close(step.forward(layer, query, key, value).double(), expected, rtol=0, atol=2e-4)
    stored = backend.block_tensors[1].flatten(0, 1)[7 * 16 : 8 * 16]
    torch.testing.assert_close(stored, hadamard_transform(text.value[0, :16]), rtol=0, atol=1e-6)


def test_chunks_change_no_bit_of_what_is_stored() -> None:
    config = shape(head_dim=96)
    text = Text(config, 100, seed=0, dtype=torch.bfloat16)
    (basis,) = bases(1, 96)
    settings = PoolSettings(
        block_size=16,
        dtype=torch.bfloat16,
        device=CPU,
        cache_type=PagedCacheType.Q4,
        key_offsets=(basis.keys(text.key[0, :1]),),
        bases=(basis,),
    )

    def stored(chunks: tuple[int, ...]) -> list[torch.Tensor]:
        backend = PagedBackend(config, settings, 7)
        for tensor in backend.block_tensors:
            tensor.zero_()  # behind the text
        first = 0
        for chunk in chunks:
            part = slice(first, first + chunk)
            step = backend.prepare([span(first, chunk, list(range(7)))])
            step.forward(0, text.query[0, part], text.key[0, part], text.value[0, part])
            first += chunk
        return [tensor.view(torch.uint8) for tensor in backend.block_tensors]

    for one, other in zip(stored((100,)), stored((50, 1, 33, 16)), strict=True):
        assert torch.equal(one, other)


def test_what_is_measured_is_part_of_what_blocks_are() -> None:
    """Blocks that are stored elsewhere are read by a model with the same code only."""
    config = shape(head_dim=32)
    plain = PoolSettings(block_size=16, dtype=torch.float32, device=CPU, cache_type=PagedCacheType.Q4)
    offsets = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(0))
    one, other = bases(2, 32)
    codes = {
        PagedBackend(config, evolve(plain, bases=own, key_offsets=key_offsets), 2).code
        for own in ((), (one,), (other,))
        for key_offsets in ((), (offsets,), (offsets + 1,))
    }
    assert len(codes) == 9
    assert PagedBackend(config, plain, 2).code == b""
    assert PagedBackend(config, evolve(plain, bases=(one,)), 3).code in codes


def test_offsets_and_codes_are_in_the_basis() -> None:
    """Keys near one large vector, and one element far larger than others: 4 bits lose no more than on keys without."""
    config = shape(head_dim=64)
    text = Text(config, 200, seed=0, dtype=torch.float32, spread=1)
    factors = torch.ones(2, 64)
    factors[:, 3] = 1e-3
    text.query[..., 3] /= 1000
    common = 30 * torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    large = text.key[0].clone()
    large[..., 3] *= 1000
    large += common

    def outputs(key: torch.Tensor, settings: PoolSettings) -> torch.Tensor:
        backend = PagedBackend(config, settings, 16)
        parts = []
        for first, last in ((0, 150), (150, 199), (199, 200)):
            step = backend.prepare([span(first, last - first, list(range(13)))])
            parts.append(step.forward(0, text.query[0, first:last], key[first:last], text.value[0, first:last]))
        return torch.cat(parts)

    def error(key: torch.Tensor, *, changed: bool) -> float:
        exact, q4 = (
            PoolSettings(block_size=16, dtype=torch.float32, device=CPU, cache_type=kind)
            for kind in (PagedCacheType.AUTO, PagedCacheType.Q4)
        )
        if changed:
            basis = KvBasis(factors)
            q4 = evolve(q4, bases=(basis,), key_offsets=(basis.keys(common).repeat(2, 1, 1),))
        expected = outputs(key, exact)
        return float((outputs(key, q4) - expected).square().mean().sqrt() / expected.square().mean().sqrt())

    plain = error(text.key[0], changed=False)
    assert error(large, changed=True) < 1.2 * plain < error(large, changed=False) / 3

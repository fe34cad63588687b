"""KV in f8e4m3: how far from the exact values it may be."""

from __future__ import annotations

import pytest
import torch
from naive_attention import CPU, Text, naive_attention, shape
from torch import Tensor

from native_weights import needs_library, workspace
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kernels.attention_inputs import Precision
from paged_sdk.kernels.fp8 import F8E4M3_MAX, dequantize_f8e4m3, quantize_f8e4m3
from spans import span


def fp8(block_size: int, dtype: torch.dtype, key_offsets: tuple[torch.Tensor, ...] = ()) -> PoolSettings:
    return PoolSettings(
        block_size=block_size, dtype=dtype, device=CPU, cache_type=PagedCacheType.F8E4M3, key_offsets=key_offsets
    )


def test_every_code_is_decoded_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[~codes.float().isnan()]
    decoded = dequantize_f8e4m3(codes[:, None], torch.ones(len(codes)), torch.float32)
    assert torch.equal(decoded[:, 0], codes.float())


def errors(x: Tensor, scale: Tensor) -> Tensor:
    """Return the root of the summed squares of the errors of rounding in units of a scale, in float64, by torch's own
    cast.
    """
    ratio = x.double() / scale.double()[..., None]
    rounded = ratio.float().clamp(-F8E4M3_MAX, F8E4M3_MAX).to(torch.float8_e4m3fn).double()
    return (rounded - ratio).square().sum(-1).sqrt() * scale.double()


def vectors(tail: float, size: int = 64) -> Tensor:
    """Draw random vectors, with larger elements among smaller ones the larger ``tail`` is."""
    generator = torch.Generator().manual_seed(0)
    x, exponent = (torch.randn(400, 3, size, generator=generator) for _ in range(2))
    return x * (tail * exponent).exp()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e4, 1e30])
def test_rounding_is_the_only_loss(magnitude: float) -> None:
    """Half a unit in the last of 3 mantissa bits: 1/16, or half the smallest subnormal, 2**-10 of the scale. The
    largest element loses nothing.
    """
    x = vectors(0) * magnitude
    codes, scale = quantize_f8e4m3(x)
    decoded = dequantize_f8e4m3(codes, scale, torch.float32)
    assert ((decoded - x).abs() <= torch.maximum(x.abs() / 16, scale[..., None] * 2**-10) * 1.0001).all()
    largest = codes.float().abs().amax(-1)
    assert set(largest.flatten().tolist()) == {448, 416, 384, 352, 320, 288, 256}
    torch.testing.assert_close(decoded.abs().amax(-1), x.abs().amax(-1), rtol=3e-7, atol=0)


@pytest.mark.parametrize("size", [16, 64, 256])
@pytest.mark.parametrize("tail", [0, 1, 2])
def test_no_scale_of_the_seven_loses_less(tail: float, size: int) -> None:
    """Errors are counted in 1/128 of a scale, so each is known to half of that."""
    x = vectors(tail, size)
    codes, scale = quantize_f8e4m3(x)
    peak = x.abs().amax(-1)
    error = (codes.double() * scale.double()[..., None] - x.double()).square().sum(-1).sqrt()
    candidates = torch.stack([errors(x, peak / code) for code in (448, 416, 384, 352, 320, 288, 256)])
    unknown = size**0.5 / 256 * (peak / 256 + scale).double()
    assert (error <= candidates.amin(0) + unknown).all()
    # Measured: 0.54 to 0.85 without a tail, less with one.
    relative = error.square() / peak**2, candidates[0].square() / peak**2
    assert relative[0].mean() < 0.9 * relative[1].mean()


@pytest.mark.parametrize("size", [1, 48])
def test_of_equal_scales_the_usual_one(size: int) -> None:
    """A vector whose elements are all codes loses nothing at 448, and its scale is amax / 448."""
    x = torch.zeros(3, size)
    x[0], x[1, 0], x[2] = 3.7, -1e-3, torch.tensor([448.0, -224.0, 1.75, 0.0]).repeat(12)[:size]
    _, scale = quantize_f8e4m3(x)
    assert torch.equal(scale, x.abs().amax(-1) / 448)


def test_a_vector_is_quantized_alone() -> None:
    x = vectors(1)
    codes, scale = quantize_f8e4m3(x)
    for part in (slice(0, 1), slice(7, 90)):
        part_codes, part_scale = quantize_f8e4m3(x[part, 1:])
        assert torch.equal(part_codes.view(torch.uint8), codes[part, 1:].view(torch.uint8))
        assert torch.equal(part_scale, scale[part, 1:])


@pytest.mark.parametrize("peak", [5e-36, 1e-38, 1e-42])
def test_scales_stay_normal_numbers(peak: float) -> None:
    x = vectors(0)
    x *= peak / x.abs().amax()
    codes, scale = quantize_f8e4m3(x)
    assert (scale >= torch.finfo(torch.float32).tiny).all()
    error = (codes.double() * scale.double()[..., None] - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() / 16, scale.double()[..., None] * 2**-10) * 1.0001).all()


def test_zeros_stay_zeros_and_nan_stays_visible() -> None:
    x = torch.zeros(3, 4)
    x[1, 2], x[2, 1] = torch.nan, torch.inf
    decoded = dequantize_f8e4m3(*quantize_f8e4m3(x), torch.float32)
    assert torch.equal(decoded[0], torch.zeros(4))
    assert decoded[1].isnan().any()
    assert not decoded[2].isfinite().all()


@pytest.mark.parametrize("windows", [(None,), (24,)])
def test_attention_is_within_four_percent(windows: tuple[int | None, ...]) -> None:
    """Root mean square, with independent random keys and values; measured: 3.2 % and 3.3 %."""
    config = shape(windows=windows, head_dim=64)
    backend = PagedBackend(config, fp8(32, torch.float32), 8)
    for layer in backend._layers:
        for scales in (layer.k_scale, layer.v_scale):
            assert scales is not None
            scales.fill_(torch.nan)  # what unused slots hold is of no account
    text = Text(config, 200, seed=0, dtype=torch.float32, spread=1)
    outputs = []
    for first, last in ((0, 120), (120, 199), (199, 200)):
        step = backend.prepare([span(first, last - first, [7, 2, 5, 1, 3, 0, 6])])
        outputs.append(step.forward(0, text.query[0, first:last], text.key[0, first:last], text.value[0, first:last]))
    error = torch.cat(outputs).double() - text.expected[0]
    assert error.square().mean().sqrt() < 0.04 * text.expected.square().mean().sqrt()


def test_chunks_change_nothing() -> None:
    """Scales are each token's own, so what is in the cache does not depend on what was written with it."""
    config = shape(head_dim=64)

    def outputs(chunks: tuple[int, ...]) -> torch.Tensor:
        backend = PagedBackend(config, fp8(16, torch.float64), 8)
        text = Text(config, 100, seed=0, dtype=torch.float64)
        parts = []
        first = 0
        for chunk in chunks:
            part = slice(first, first + chunk)
            step = backend.prepare([span(first, chunk, list(range(8)))])
            parts.append(step.forward(0, text.query[0, part], text.key[0, part], text.value[0, part]))
            first += chunk
        return torch.cat(parts)

    torch.testing.assert_close(outputs((50, 1, 49)), outputs((100,)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("windows", [(None,), (150,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_library)], ids=["torch", "native"])
def test_what_keys_have_in_common_is_no_loss(
    windows: tuple[int | None, ...], dtype: torch.dtype, *, native: bool
) -> None:
    """Keys near one large vector per 128 positions: within what they are within without it, beside decodes too."""
    config = shape(windows=windows, head_dim=64)
    texts = [Text(config, length, seed=length, dtype=torch.float64, spread=1) for length in (300, 140)]
    common = 6 * torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(0))
    for text in texts:
        text.key += common[torch.arange(text.key.shape[1]) // 128]
        text.expected[0] = naive_attention(config, 0, *(each[0] for each in (text.query, text.key, text.value)))

    def error(key_offsets: tuple[torch.Tensor, ...]) -> float:
        settings = fp8(16, dtype, key_offsets)
        if native:
            backend: PagedBackend = NativePagedBackend(
                config, settings, 32, workspace=workspace(), precision=Precision.INT8
            )
        else:
            backend = PagedBackend(config, settings, 32)
        tables = (list(range(19)), list(range(19, 28)))
        outputs, expected = [], []
        for parts in (((0, 200), (0, 1)), ((200, 298), (1, 139)), ((298, 299), (139, 140)), ((299, 300), None)):
            chosen = [(text, table, part) for text, table, part in zip(texts, tables, parts, strict=True) if part]
            step = backend.prepare([span(first, last - first, table) for _, table, (first, last) in chosen])
            query, key, value = (
                torch.cat([getattr(text, name)[0, first:last] for text, _, (first, last) in chosen]).to(dtype)
                for name in ("query", "key", "value")
            )
            outputs.append(step.forward(0, query, key, value))
            expected += [text.expected[0, first:last] for text, _, (first, last) in chosen]
        right = torch.cat(expected)
        return float((torch.cat(outputs).double() - right).square().mean().sqrt() / right.square().mean().sqrt())

    assert error((common,)) < (0.04 if dtype == torch.float32 else 0.06)
    assert error(()) > 0.1


def test_half_the_bytes_and_the_scales() -> None:
    config = shape(head_dim=64)
    pools = [
        PagedBackend(config, settings, 4)
        for settings in (PoolSettings(block_size=16, dtype=torch.bfloat16, device=CPU), fp8(16, torch.bfloat16))
    ]
    scales = 4 * 16 * 2 * config.num_kv_heads * 4
    assert pools[1].num_bytes == pools[0].num_bytes // 2 + scales

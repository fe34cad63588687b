"""Epilogues of products with row scales, native against the torch references, and those against float64 algebra."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from native_weights import every_level, needs_library, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.epilogue import finish_product, place_heads
from paged_sdk.kernels.native.paged_attention import AttentionShape, LayerCache

DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@needs_library
@every_level
@pytest.mark.parametrize("product_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [48, 37])
def test_finished_products(isa: str, cols: int, dtype: torch.dtype, product_dtype: torch.dtype) -> None:
    product, scales = random(7, cols + 3).to(product_dtype)[:, :cols], random(7, seed=1)
    bias, residual = random(cols, seed=2), random(7, cols, seed=3).to(dtype)
    scaled = product.double() * scales.double()[:, None]
    rtol = 1e-6 if dtype == torch.float32 else 8e-3
    for engine in (workspace(isa, 2), None):
        for out, given, expected in (
            (torch.empty(7, cols, dtype=dtype), (None, None), scaled),
            (torch.empty(7, 2 * cols, dtype=dtype)[:, :cols], (bias, residual), scaled + bias + residual),
        ):
            assert finish_product(engine, product, scales, out=out, bias=given[0], residual=given[1]) is out
            torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=1e-6)
        stream = residual.clone()
        finish_product(engine, product, None, out=stream, residual=stream)
        expected = residual.double() + product.double()
        torch.testing.assert_close(stream.double(), expected, rtol=rtol, atol=1e-6)


@needs_library
def test_a_scale_of_nan_stays_in_its_row() -> None:
    product, scales = random(3, 32), torch.tensor([1.0, torch.nan, 2.0])
    for engine in (workspace(), None):
        got = finish_product(engine, product, scales, out=torch.empty(3, 32))
        assert got.isnan().all(1).tolist() == [False, True, False]


def empty_cache(shape: AttentionShape, dtype: torch.dtype) -> LayerCache:
    size = (3, 8, shape.num_kv_heads, shape.head_size)
    scales = (torch.zeros(size[:3]), torch.zeros(size[:3])) if dtype == torch.float8_e4m3fn else (None, None)
    return LayerCache(torch.zeros(size).to(dtype), torch.zeros(size).to(dtype), *scales)


def contents(cache: LayerCache) -> tuple[Tensor, Tensor]:
    if cache.k_scale is None or cache.v_scale is None:
        return cache.key.double(), cache.value.double()
    return cache.key.double() * cache.k_scale[..., None], cache.value.double() * cache.v_scale[..., None]


@needs_library
@every_level
@pytest.mark.parametrize("cache_dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("heads", [(6, 2, 64, 32), (4, 4, 32, 8)], ids=str)
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias and norms"])
def test_placed_heads(isa: str, heads: tuple[int, int, int, int], cache_dtype: torch.dtype, extras: bool) -> None:
    num_heads, num_kv_heads, size, half = heads
    shape = AttentionShape(num_heads, num_kv_heads, size, scale=1.0)
    width = (num_heads + 2 * num_kv_heads) * size
    product, scales = random(9, width).bfloat16(), random(9, seed=1).abs()
    angles = random(9, half, seed=2)
    slots = torch.randperm(24, generator=torch.Generator().manual_seed(3))[:9]
    bias = random(width, seed=4) if extras else None
    norms = (random(size, seed=5), random(size, seed=6)) if extras else (None, None)

    vectors = (product.double() * scales.double()[:, None] + (0 if bias is None else bias)).view(9, -1, size)
    parts = []
    for part, norm in zip(
        torch.split(vectors[:, : num_heads + num_kv_heads], [num_heads, num_kv_heads], 1), norms, strict=True
    ):
        if norm is not None:
            part = part * (part.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm
        turned = torch.view_as_complex(torch.stack((part[..., :half], part[..., half : 2 * half]), -1))
        turned = turned * torch.polar(torch.ones(9, 1, half).double(), angles.double()[:, None])
        parts.append(torch.cat((turned.real, turned.imag, part[..., 2 * half :]), -1))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float8_e4m3fn: 7e-2}[cache_dtype]

    for engine, dtype in ((workspace(isa, 2), torch.float32), (workspace(isa), torch.bfloat16), (None, torch.float32)):
        cache = empty_cache(shape, cache_dtype)
        queries = place_heads(
            engine,
            product,
            scales,
            shape,
            cache,
            cosines=angles.cos(),
            sines=angles.sin(),
            slots=slots,
            bias=bias,
            query_norm=norms[0],
            key_norm=norms[1],
            norm_eps=1e-6,
            dtype=dtype,
        )
        assert queries.shape == (9, num_heads, size)
        assert queries.dtype == dtype
        close = 1e-5 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(queries.double(), parts[0], rtol=close, atol=1e-5)
        for got, expected in zip(contents(cache), (parts[1], vectors[:, num_heads + num_kv_heads :]), strict=True):
            flat = got.flatten(0, 1)
            largest = float(expected.abs().max()) if cache_dtype == torch.float8_e4m3fn else 1.0
            torch.testing.assert_close(
                flat[slots], expected, rtol=tolerance, atol=2e-3 * largest * (tolerance > 1e-2) + 1e-5
            )
            untouched = torch.ones(24, dtype=torch.bool)
            untouched[slots] = False
            assert (flat[untouched] == 0).all()


def test_what_does_not_fit_is_refused() -> None:
    shape = AttentionShape(4, 2, 32, scale=1.0)
    cache, product, turn = empty_cache(shape, torch.float32), torch.zeros(2, 256), torch.zeros(2, 16)
    slots = torch.arange(2)
    calls: list[Callable[[], object]] = [
        lambda: finish_product(None, product, torch.ones(3), out=product),
        lambda: finish_product(None, product, None, out=product[:, 1:]),
        lambda: finish_product(None, product, None, out=product, residual=product.bfloat16()),
        lambda: finish_product(None, product, None, out=product, bias=torch.ones(3)),
        lambda: place_heads(None, product[:, 1:], None, shape, cache, cosines=turn, sines=turn, slots=slots),
        lambda: place_heads(None, product, None, shape, cache, cosines=turn, sines=turn[:1], slots=slots),
        lambda: place_heads(None, product, None, shape, cache, cosines=turn, sines=turn, slots=slots.int()),
        lambda: place_heads(
            None, product, None, shape, cache, cosines=product[:, :17], sines=product[:, :17], slots=slots
        ),
        lambda: place_heads(
            None, product, None, shape, cache, cosines=turn, sines=turn, slots=slots, dtype=torch.float16
        ),
    ]
    for call in calls:
        with pytest.raises(ConfigError):
            call()

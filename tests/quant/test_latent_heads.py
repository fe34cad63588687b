"""Projections between latent vectors and heads, packed and by torch: the same numbers, in as many bytes as planned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from native_weights import needs_library, workspace
from paged_sdk.config.latent_attention import LatentAttentionConfig
from paged_sdk.kernels.latent_heads import LatentHeads
from paged_sdk.quant.form import Place
from paged_sdk.quant.latent_heads import latent_bytes, make_latent_heads

HEADS = 3
SHAPE = LatentAttentionConfig(rank=96, rope_dim=16, nope_dim=64, value_dim=32)
ODD = LatentAttentionConfig(rank=40, rope_dim=16, nope_dim=24, value_dim=20)
IN_SIXTEENS = LatentAttentionConfig(rank=96, rope_dim=16, nope_dim=48, value_dim=32)


def place(dtype: torch.dtype, *, native: bool = True) -> Place:
    return Place(device=torch.device("cpu"), dtype=dtype, workspace=workspace() if native else None, one_form=False)


def projections(shape: LatentAttentionConfig) -> Tensor:
    height = shape.nope_dim + shape.value_dim
    return torch.randn(HEADS * height, shape.rank, generator=torch.Generator().manual_seed(2)) / 10


def made(shape: LatentAttentionConfig, there: Place, *, is_quantized: bool = False) -> LatentHeads:
    heads = make_latent_heads(projections(shape), shape, there, is_quantized=is_quantized)
    assert heads.num_bytes == latent_bytes(HEADS, shape, there, is_quantized=is_quantized)
    return heads


def rows(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(3))


def results(heads: LatentHeads, shape: LatentAttentionConfig, dtype: torch.dtype) -> list[Tensor]:
    """Return what heads absorb, and the values that they return."""
    absorbed = torch.zeros(9, HEADS, shape.rank, dtype=dtype)
    heads.absorb(rows(9, HEADS, shape.nope_dim).to(dtype), absorbed)
    return [absorbed.double(), heads.values(rows(9, HEADS, shape.rank).to(dtype)).double()]


def expected(shape: LatentAttentionConfig) -> list[Tensor]:
    """Return the same, written out in float64."""
    up = torch.unflatten(projections(shape).double(), 0, (HEADS, -1))
    keys, values = up[:, : shape.nope_dim], up[:, shape.nope_dim :]
    return [
        torch.einsum("nhk,hkr->nhr", rows(9, HEADS, shape.nope_dim).double(), keys),
        torch.einsum("nhr,hvr->nhv", rows(9, HEADS, shape.rank).double(), values),
    ]


def error(got: Tensor, right: Tensor) -> float:
    return float((got - right).norm() / right.norm())


@pytest.mark.parametrize("shape", [SHAPE, ODD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_by_torch(shape: LatentAttentionConfig, dtype: torch.dtype) -> None:
    heads = made(shape, place(dtype, native=False), is_quantized=True)
    assert (heads.format, heads.decompresses) == (str(dtype).removeprefix("torch."), False)
    for got, right in zip(results(heads, shape, dtype), expected(shape), strict=True):
        assert error(got, right) < (1e-2 if dtype == torch.bfloat16 else 1e-6)


@needs_library
@pytest.mark.parametrize(
    ("shape", "dtype", "is_quantized", "stored"),
    [
        (SHAPE, torch.float32, False, "float32"),
        (SHAPE, torch.bfloat16, False, "bfloat16"),
        (SHAPE, torch.float16, False, "float16"),
        (SHAPE, torch.bfloat16, True, "Q8_0"),
        (IN_SIXTEENS, torch.bfloat16, True, "bfloat16"),
    ],
)
def test_packed(shape: LatentAttentionConfig, dtype: torch.dtype, is_quantized: bool, stored: str) -> None:
    heads = made(shape, place(dtype), is_quantized=is_quantized)
    assert (heads.format, heads.decompresses) == (stored, True)
    most = 1e-6 if dtype == torch.float32 else 1.5e-2
    for got, right in zip(results(heads, shape, dtype), expected(shape), strict=True):
        assert error(got, right) < most
    up = torch.unflatten(projections(shape).double(), 0, (HEADS, -1))
    latents = rows(50, shape.rank + 16).to(dtype)[:, 16:]
    whole = torch.zeros(50, 2, shape.query_dim + shape.value_dim, dtype=dtype)
    keys, values = whole[..., : shape.nope_dim], whole[..., shape.query_dim :]
    heads.decompress(latents, keys, values, 1)
    right = torch.einsum("nr,hdr->nhd", latents.double(), up[1:])
    assert error(keys.double(), right[..., : shape.nope_dim]) < most
    assert error(values.double(), right[..., shape.nope_dim :]) < most
    assert not whole[..., shape.nope_dim : shape.query_dim].any()


@needs_library
@pytest.mark.parametrize(("shape", "dtype"), [(ODD, torch.bfloat16), (SHAPE, torch.float64)])
def test_what_the_kernels_cannot_multiply_is_left_to_torch(shape: LatentAttentionConfig, dtype: torch.dtype) -> None:
    heads = made(shape, place(dtype), is_quantized=True)
    assert (heads.format, heads.decompresses) == (str(dtype).removeprefix("torch."), False)

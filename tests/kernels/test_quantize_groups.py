"""Types of groups: codes and scales held to brute force, to rounding by the range alone, and to exact values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import pytest
import torch
from torch import Tensor

from paged_sdk.errors import CheckpointError
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix
from paged_sdk.kernels.quantized.quantize_groups import (
    FP4_LEVELS,
    NF4_LEVELS,
    quantize_affine,
    quantize_fp8,
    quantize_half_quadratic,
    quantize_levels,
    quantize_rows,
)

KINDS: Final[dict[str, Callable[[Tensor], GroupedMatrix]]] = {
    **{f"AFQ{bits}": partial(quantize_affine, bits=bits) for bits in (2, 3, 4, 6, 8)},
    **{f"HQQ{bits}": partial(quantize_half_quadratic, bits=bits) for bits in (4, 8)},
    "NF4": partial(quantize_levels, levels=NF4_LEVELS),
    "FP4": partial(quantize_levels, levels=FP4_LEVELS),
    "INT8": quantize_rows,
    "FP8": quantize_fp8,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def normal(rows: int, cols: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 0.02


def error(matrix: GroupedMatrix, weight: Tensor, power: float = 2.0) -> float:
    return float((matrix.decoded() - weight).double().abs().pow(power).mean())


def by_the_range(weight: Tensor, bits: int) -> Tensor:
    """Round 64 weights to steps of their range."""
    x: Tensor = weight.reshape(len(weight), -1, 64).double()
    lowest, step = x.amin(-1, keepdim=True), (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / (2**bits - 1)
    rounded: Tensor = ((x - lowest) / step).round() * step + lowest
    return rounded.reshape(weight.shape)


@every_kind
def test_every_row_by_itself_in_the_dtype_it_comes_in(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(5, 160)  # the last group has half the columns
    whole = KINDS[kind](weight)
    assert whole.shape == (5, 160)
    assert whole.bits == int(kind[-1])
    monkeypatch.setattr("paged_sdk.kernels.quantized.quantize_groups._WEIGHTS_AT_ONCE", 320)
    assert torch.equal(KINDS[kind](weight).decoded(), whole.decoded())
    assert torch.equal(KINDS[kind](weight[3:4]).decoded(), whole.decoded()[3:4])
    half = weight.bfloat16()
    assert torch.equal(KINDS[kind](half).decoded(), KINDS[kind](half.float()).decoded())


@every_kind
def test_weights_that_are_hard_to_scale(kind: str) -> None:
    weight = torch.zeros(6, 128)
    weight[1], weight[2], weight[3], weight[4, 0] = 1.0, -0.5, 1e-30, 30000.0
    weight[5] = torch.tensor([-3.0, 3.0]).repeat(64)
    decoded = KINDS[kind](weight).decoded()
    assert decoded.isfinite().all()
    torch.testing.assert_close(decoded, weight, rtol=0.01, atol=1e-6)


@every_kind
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 4e4])
def test_weights_that_no_scale_fits_are_refused(kind: str, bad: float) -> None:
    weight = normal(4, 128)
    weight[2, 100] = bad
    with pytest.raises(CheckpointError, match="32,768"):
        KINDS[kind](weight)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_affine_groups_are_nearer_than_their_range_alone(bits: int) -> None:
    weight = normal(16, 1024)
    least = float((by_the_range(weight, bits) - weight).square().mean())
    assert error(quantize_affine(weight, bits), weight) < least
    # Scales are rounded to 16 bits, which weights of eight bits feel.
    assert error(quantize_affine(weight + 0.1, bits), weight + 0.1) < 1.1 * least


@pytest.mark.parametrize("bits", [4, 8])
def test_half_quadratic_optimization_leaves_fewer_large_errors(bits: int) -> None:
    weight = normal(16, 1024) / normal(16, 1024, seed=1).abs().clamp_min(0.004)
    rounded = by_the_range(weight, bits)
    own = error(quantize_half_quadratic(weight, bits), weight, 0.7)
    assert own < float((rounded - weight).abs().pow(0.7).mean()) * 0.99


@pytest.mark.parametrize("levels", [NF4_LEVELS, FP4_LEVELS], ids=["NF4", "FP4"])
def test_the_nearest_level(levels: tuple[float, ...]) -> None:
    weight = normal(3, 128)
    matrix = quantize_levels(weight, levels)
    scale = weight.reshape(len(weight), -1, 64).abs().amax(-1, keepdim=True).half().float()
    table = torch.tensor(levels)
    distances = (weight.reshape(len(weight), -1, 64) / scale).unsqueeze(-1) - table
    nearest = table[distances.abs().argmin(-1)] * scale
    torch.testing.assert_close(matrix.decoded(), nearest.flatten(1), rtol=0, atol=0)
    assert len(set(levels)) >= 15
    assert max(levels) == 1.0


def test_rows_of_eight_bits_and_of_floats() -> None:
    weight = normal(4, 256)
    largest = weight.abs().amax(1, keepdim=True)
    int8, fp8 = quantize_rows(weight).decoded(), quantize_fp8(weight).decoded()
    assert ((int8 - weight).abs() <= largest / 127 * 0.5001).all()
    exact = (weight / (largest / 448)).to(torch.float8_e4m3fn).float() * (largest / 448)
    torch.testing.assert_close(fp8, exact, rtol=1e-6, atol=1e-9)

"""Types of groups quantized natively: beside torch's quantizers, which define them, on every instruction set."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import pytest
import torch
from torch import Tensor

from native_weights import every_level, library, needs_library
from paged_sdk.errors import CheckpointError, ConfigError
from paged_sdk.kernels.native import quantize_groups as native
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.quantized import quantize_groups as by_torch
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix
from paged_sdk.kernels.quantized.quantize_groups import FP4_LEVELS, NF4_LEVELS

pytestmark = needs_library

Native = Callable[[NativeLibrary, Tensor], GroupedMatrix]
ByTorch = Callable[[Tensor], GroupedMatrix]

KINDS: Final[dict[str, tuple[Native, ByTorch]]] = {
    **{
        f"AFQ{bits}": (partial(native.quantize_affine, bits=bits), partial(by_torch.quantize_affine, bits=bits))
        for bits in (2, 3, 4, 6, 8)
    },
    **{
        f"HQQ{bits}": (
            partial(native.quantize_half_quadratic, bits=bits),
            partial(by_torch.quantize_half_quadratic, bits=bits),
        )
        for bits in (4, 8)
    },
    **{
        name: (partial(native.quantize_levels, levels=levels), partial(by_torch.quantize_levels, levels=levels))
        for name, levels in (("NF4", NF4_LEVELS), ("FP4", FP4_LEVELS))
    },
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def normal(rows: int, cols: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 0.02


def outliers(rows: int, cols: int) -> Tensor:
    """Return weights of which some are so large that half-quadratic optimization keeps their errors."""
    return normal(rows, cols) / normal(rows, cols, seed=1).abs().clamp_min(1e-3)


def error(matrix: GroupedMatrix, weight: Tensor) -> float:
    return float((matrix.decoded() - weight).double().abs().pow(0.7).mean())


@every_level
@every_kind
@pytest.mark.parametrize("make", [normal, outliers])
def test_as_torch_does(isa: str, kind: str, make: Callable[[int, int], Tensor]) -> None:
    weight = make(5, 32 * (2 * 17 + 1))  # a lane's worth of groups, one more, and half a one
    quantize, define = KINDS[kind]
    own, reference = quantize(library(isa), weight), define(weight)
    assert own.shape == reference.shape
    assert (own.bits, own.group_size, own.has_minima) == (reference.bits, 64, reference.has_minima)
    # Sums of another order may choose the other of two fits that are as good.
    same = own.codes == reference.codes
    assert same.float().mean() > (0.97 if kind.endswith("8") else 0.995)
    assert error(own, weight) < 1.002 * error(reference, weight)
    if kind in ("NF4", "FP4"):
        assert same.all()
        assert torch.equal(own.decoded(), reference.decoded())


@every_level
@every_kind
def test_the_same_numbers_on_every_level(isa: str, kind: str) -> None:
    weight = outliers(3, 32 * 41)
    quantize, _ = KINDS[kind]
    own, best = quantize(library(isa), weight), quantize(library(), weight)
    assert torch.equal(own.codes, best.codes)
    assert torch.equal(own.decoded(), best.decoded())


@every_kind
def test_every_row_by_itself_in_the_dtype_it_comes_in(kind: str) -> None:
    quantize, _ = KINDS[kind]
    weight = normal(7, 160)
    whole = quantize(library(), weight, num_threads=2).decoded()  # type: ignore[call-arg]
    assert torch.equal(quantize(library(), weight[3:4]).decoded(), whole[3:4])
    for dtype in (torch.bfloat16, torch.float16):
        half = weight.to(dtype)
        assert torch.equal(quantize(library(), half).decoded(), quantize(library(), half.float()).decoded())
    wide = torch.cat([weight, weight], dim=1)
    assert torch.equal(quantize(library(), wide[:, :160]).decoded(), whole)


@every_level
@every_kind
def test_weights_that_are_hard_to_scale(isa: str, kind: str) -> None:
    weight = torch.zeros(6, 128)
    weight[1], weight[2], weight[3], weight[4, 0] = 1.0, -0.5, 1e-30, 30000.0
    weight[5] = torch.tensor([-3.0, 3.0]).repeat(64)
    decoded = KINDS[kind][0](library(isa), weight).decoded()
    assert decoded.isfinite().all()
    torch.testing.assert_close(decoded, weight, rtol=0.01, atol=1e-6)


@every_kind
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 4e4])
def test_weights_that_no_scale_fits_are_refused(kind: str, bad: float) -> None:
    weight = normal(4, 160)
    weight[2, 150] = bad
    with pytest.raises(CheckpointError, match="32,768"):
        KINDS[kind][0](library(), weight)


@pytest.mark.parametrize(
    "weight",
    [torch.zeros(4, 48), torch.zeros(4), torch.zeros(4, 64, dtype=torch.float64), torch.zeros(64, 64).t()[::2]],
)
def test_arguments_that_do_not_fit(weight: Tensor) -> None:
    with pytest.raises(ConfigError, match="weight"):
        native.quantize_affine(library(), weight, 4)

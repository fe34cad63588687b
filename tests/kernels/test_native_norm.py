"""Norms in one native call, against torch in float64."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from native_weights import every_level, needs_library, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.norm import NativeNorm

pytestmark = needs_library

EPS = 1e-5
KINDS = pytest.mark.parametrize("kind", ["rms", "layer"])
Kind = Literal["rms", "layer"]


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, kind: Kind) -> Tensor:
    wide, size = x.double(), x.shape[-1:]
    if kind == "rms":
        return F.rms_norm(wide, size, weight.double(), EPS)
    return F.layer_norm(wide, size, weight.double(), None if bias is None else bias.double(), EPS)


@every_level
@KINDS
@pytest.mark.parametrize(("num_rows", "num_threads"), [(0, 1), (1, 1), (300, 2)])
@pytest.mark.parametrize("size", [16, 208, 576])
def test_norms(isa: str, kind: Kind, size: int, num_rows: int, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x, weight = torch.randn(num_rows, size, generator=generator) * 30 + 2, torch.randn(size, generator=generator)
    bias = torch.randn(size, generator=generator) if kind == "layer" else None
    own = workspace(isa, num_threads)
    for given in (None, bias):
        norm = NativeNorm(own, weight, bias=given, eps=EPS, kind=kind)
        got = norm.forward(x)
        torch.testing.assert_close(got, normed(x, weight, given, kind).float(), rtol=2e-6, atol=2e-6)
        # A row's result depends on itself alone.
        assert all(torch.equal(norm.forward(x[row : row + 1])[0], got[row]) for row in range(0, num_rows, 37))


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(kind: Kind, bad: float) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    norm = NativeNorm(workspace(), torch.ones(64), eps=EPS, kind=kind)
    expected = norm.forward(x)
    x[2, 7] = bad
    got = norm.forward(x)
    assert got[2].isnan().any()
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], expected[others])


def test_rows_may_lie_apart() -> None:
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(1))
    norm = NativeNorm(workspace(), torch.ones(32), eps=EPS, kind="rms")
    assert torch.equal(norm.forward(x[:, 32:64]), norm.forward(x[:, 32:64].contiguous()))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 16"):
        NativeNorm(workspace(), torch.ones(24), eps=EPS, kind="rms")
    with pytest.raises(ConfigError, match="bias"):
        NativeNorm(workspace(), torch.ones(32), bias=torch.ones(32), eps=EPS, kind="rms")
    with pytest.raises(ConfigError, match="bias"):
        NativeNorm(workspace(), torch.ones(32), bias=torch.ones(16), eps=EPS, kind="layer")
    norm = NativeNorm(workspace(), torch.ones(32), eps=EPS, kind="rms")
    for wrong in (torch.ones(3, 48), torch.ones(3, 32, dtype=torch.bfloat16)):
        with pytest.raises(ConfigError, match="x"):
            norm.forward(wrong)

"""Rotated int8 activations, native and in torch, against float64 algebra with an explicit Hadamard matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from native_weights import every_level, needs_library, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.rotation import gated_rotate_quantise, rotate_quantise

DTYPES = [torch.float32, torch.bfloat16]
REFERENCE = pytest.param(None, id="torch")


def hadamard(size: int) -> Tensor:
    """Entry (i, j) is -1 to the number of bits that i and j share."""
    index = torch.arange(size)
    shared = (index[:, None] & index)[..., None] >> torch.arange(9) & 1
    signs: Tensor = 1 - 2 * (shared.sum(-1) % 2)
    return signs.double().div(size**0.5)


def rotated(x: Tensor, block: int) -> Tensor:
    return (x.double().reshape(len(x), -1, block) @ hadamard(block)).reshape(x.shape)


def check(codes: Tensor, scales: Tensor, expected: Tensor, *, zero_point: int) -> None:
    largest = expected.abs().amax(-1)
    torch.testing.assert_close(scales.double(), largest / 127, rtol=2e-6, atol=0)
    error = (codes.double() - zero_point) * scales.double()[:, None] - expected
    assert (error.abs() <= 0.501 * largest[:, None] / 127).all()
    assert (codes.double() - zero_point).abs().max() == 127


def random_rows(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    x[:, ::17] *= 20  # channels that stand out
    return x.to(dtype)


@needs_library
@every_level
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
def test_every_block_on_every_instruction_set(isa: str, block: int, dtype: torch.dtype) -> None:
    wide = random_rows(11, 768 + 16, dtype)
    x = wide[:, :768]  # rows with a stride
    for code, zero_point in ((torch.int8, 0), (torch.uint8, 128)):
        codes, scales = rotate_quantise(workspace(isa, 2), x, block=block, dtype=code)
        assert codes.dtype == code
        check(codes, scales, rotated(x, block), zero_point=zero_point)


@pytest.mark.parametrize("block", [1, 2, 8, 64])
def test_the_reference_and_blocks_below_a_vector(block: int) -> None:
    x = random_rows(5, 192, torch.float32)
    codes, scales = rotate_quantise(None, x, block=block)
    check(codes, scales, rotated(x, block), zero_point=128)


@needs_library
@every_level
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_before(isa: str, dtype: torch.dtype) -> None:
    x, weight = random_rows(7, 576, dtype), torch.randn(576, generator=torch.Generator().manual_seed(1))
    expected = rotated(F.rms_norm(x.double(), (576,), weight.double(), 1e-5), 64)
    for engine in (workspace(isa, 2), None):
        codes, scales = rotate_quantise(engine, x, block=64, norm_weight=weight, norm_eps=1e-5)
        check(codes, scales, expected, zero_point=128)


@needs_library
@every_level
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_rows(isa: str, activation: Literal["silu", "gelu_tanh"], dtype: torch.dtype) -> None:
    x = random_rows(9, 2 * 512, dtype)
    scales = torch.rand(9, generator=torch.Generator().manual_seed(2)) / 4
    for given in (scales, None):
        gate, up = (x.double() if given is None else x.double() * given.double()[:, None]).chunk(2, -1)
        act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        for engine in (workspace(isa, 2), None):
            codes, units = gated_rotate_quantise(engine, x, given, block=256, activation=activation, dtype=torch.int8)
            check(codes, units, rotated(act * up, 256), zero_point=0)


@needs_library
def test_the_rotated_product_is_the_product() -> None:
    """Of activations with channels that stand out, where plain int8 rows lose much more."""
    x, weight = random_rows(32, 512, torch.float32), torch.randn(64, 512, generator=torch.Generator().manual_seed(4))
    expected = x.double() @ weight.double().t()
    errors = []
    for block in (256, 1):
        (a, a_scales), (b, b_scales) = (
            rotate_quantise(workspace(), rows, block=block, dtype=torch.int8) for rows in (x, weight)
        )
        got = (a.double() @ b.double().t()) * a_scales[:, None] * b_scales
        errors.append(float((got - expected).norm() / expected.norm()))
    assert errors[0] < 0.015 < errors[1]


def engines() -> list[Workspace | None]:
    return [None, workspace()]


@needs_library
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    x = random_rows(6, 256, torch.float32)
    for engine in engines():
        clean, clean_scales = rotate_quantise(engine, x, block=64)
        broken = x.clone()
        broken[3, 100] = bad
        codes, scales = rotate_quantise(engine, broken, block=64)
        assert scales[3].isnan()
        others = torch.arange(6) != 3
        assert torch.equal(codes[others], clean[others])
        assert torch.equal(scales[others], clean_scales[others])
        _, scales = gated_rotate_quantise(engine, broken, None, block=64, activation="silu")
        assert scales.isnan().tolist() == [False, False, False, True, False, False]


@needs_library
def test_zeros_are_zeros_and_no_rows_are_no_rows() -> None:
    for engine in engines():
        codes, scales = rotate_quantise(engine, torch.zeros(3, 64), block=64)
        assert (codes == 128).all()
        assert (scales == 0).all()
        codes, scales = rotate_quantise(engine, torch.zeros(0, 64), block=64)
        assert codes.shape == (0, 64)
        assert scales.shape == (0,)


@needs_library
@every_level
def test_a_row_does_not_depend_on_the_batch_or_the_threads(isa: str) -> None:
    x = random_rows(13, 1536, torch.bfloat16)
    weight = torch.rand(1536, generator=torch.Generator().manual_seed(3))
    codes, scales = rotate_quantise(workspace(isa, 3), x, block=256, norm_weight=weight, norm_eps=1e-6)
    alone = [rotate_quantise(workspace(isa), row[None], block=256, norm_weight=weight, norm_eps=1e-6) for row in x]
    assert torch.equal(codes, torch.cat([c for c, _ in alone]))
    assert torch.equal(scales, torch.cat([s for _, s in alone]))


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(2, 96)
    calls: list[Callable[[], object]] = [
        lambda: rotate_quantise(None, x, block=64),
        lambda: rotate_quantise(None, x, block=12),
        lambda: rotate_quantise(None, torch.zeros(2, 512), block=512),
        lambda: rotate_quantise(None, x.half(), block=32),
        lambda: rotate_quantise(None, x.t(), block=2),
        lambda: rotate_quantise(None, x, block=32, dtype=torch.int16),
        lambda: rotate_quantise(None, x, block=32, norm_weight=torch.ones(95)),
        lambda: gated_rotate_quantise(None, x, torch.ones(3), block=16, activation="silu"),
        lambda: gated_rotate_quantise(None, x[:, :95], None, block=16, activation="silu"),
    ]
    for call in calls:
        with pytest.raises(ConfigError):
            call()

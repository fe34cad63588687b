"""Native products with dense weights against float64 products of the same numbers."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from native_weights import every_level, library, needs_library, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.packed import DENSE_TYPES, PackedWeight, decode_rows, pack_dense, unpack_rows

pytestmark = needs_library

every_dtype = pytest.mark.parametrize("dtype", list(DENSE_TYPES), ids=str)

# Rows and columns that fill panels, vectors and blocks of columns, and that do not.
SHAPES = ((1, 1), (16, 32), (17, 33), (75, 250), (100, 513), (64, 384))
# Float32 sums of up to 513 products.
SUMS = 2e-6


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def random_dense(rows: int, cols: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[PackedWeight, Tensor]:
    """Return a packed matrix and its value in float64."""
    weight = torch.randn(rows, cols, generator=generator).to(dtype)
    return pack_dense(library(), [weight], (rows, cols), dtype, num_threads=1), weight.double()


def as_multiplied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return activations as the products take them: rounded to bfloat16 beside bfloat16 weights. -> float64"""
    return (x.bfloat16() if dtype == torch.bfloat16 else x).double()


@every_level
@every_dtype
def test_a_product_is_that_of_the_numbers(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for rows, cols in SHAPES:
        packed, weight = random_dense(rows, cols, dtype, generator)
        linear = NativeLinear(workspace(isa), [packed])
        x = torch.randn(512, cols, generator=generator)
        expected = as_multiplied(x, dtype) @ weight.T
        for num_rows in (*range(1, 41), 512) if rows == 100 else (1, 7, 33):
            assert relative(linear(x[:num_rows]), expected[:num_rows]) < SUMS


@every_level
@every_dtype
def test_one_arithmetic_for_every_number_of_rows_and_threads(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    packed, _ = random_dense(75, 514, dtype, generator)
    x, norm = torch.randn(40, 514, generator=generator), torch.rand(514, generator=generator)
    layers = [NativeLinear(workspace(isa, threads), [packed], norm_weight=norm, norm_eps=1e-5) for threads in (1, 2)]
    expected = torch.cat([layers[0](x[row : row + 1]) for row in range(len(x))])
    for layer, num_rows in product(layers, range(1, len(x) + 1)):
        assert torch.equal(layer(x[:num_rows]), expected[:num_rows])


@every_level
def test_many_rows_are_multiplied_as_one_is(isa: str) -> None:
    # 400 rows of 4,096 columns do not fit a second-level cache; ten panels are eight and two.
    generator = torch.Generator().manual_seed(6)
    packed, weight = random_dense(160, 4096, torch.bfloat16, generator)
    x = torch.randn(400, 4096, generator=generator)
    linear = NativeLinear(workspace(isa), [packed])
    every_13th = torch.cat([linear(x[row : row + 1]) for row in range(0, 400, 13)])
    for num_rows in (33, 48, 64, 81, 400):
        out = linear(x[:num_rows])
        assert torch.equal(out[::13], every_13th[: len(out[::13])])
    assert relative(out, as_multiplied(x, torch.bfloat16) @ weight.T) < SUMS


@every_level
@every_dtype
@pytest.mark.parametrize("rows_dtype", list(DENSE_TYPES), ids=str)
def test_norm_biases_residual_and_several_weights(isa: str, dtype: torch.dtype, rows_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    packed, weights = zip(*(random_dense(rows, 130, dtype, generator) for rows in (64, 19, 33)), strict=True)
    biases = [torch.randn(64, generator=generator), None, torch.randn(33, generator=generator).bfloat16()]
    norm = 1 + 0.1 * torch.randn(130, generator=generator)
    layer = NativeLinear(workspace(isa, 2), packed, biases=biases, norm_weight=norm, norm_eps=1e-6)
    x = (3 * torch.randn(7, 130, generator=generator)).to(rows_dtype)
    residual = torch.randn(7, 116, generator=generator).to(rows_dtype)
    normed = torch.nn.functional.rms_norm(x.double(), (130,), norm.double(), 1e-6)
    products = torch.cat(
        [
            as_multiplied(normed, dtype) @ weight.T + (0 if bias is None else bias.double())
            for weight, bias in zip(weights, biases, strict=True)
        ],
        dim=1,
    )
    # A number that falls on the other side of a bfloat16 step, or a result that is rounded.
    tolerance = {torch.float32: 2e-4, torch.float16: 5e-4, torch.bfloat16: 4e-3}[rows_dtype]
    assert relative(layer(x), products) < tolerance
    expected = products + residual.double()
    assert layer(x, residual=residual, out=residual) is residual
    assert relative(residual, expected) < tolerance


@every_level
@every_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(isa: str, dtype: torch.dtype, bad: float) -> None:
    generator = torch.Generator().manual_seed(4)
    packed, _ = random_dense(40, 67, dtype, generator)
    layer = NativeLinear(workspace(isa), [packed])
    for num_rows, spoiled in product((1, 5, 13), (0, 66)):  # 66: beside what pads the columns
        x = torch.randn(num_rows, 67, generator=generator)
        clean = layer(x)
        x[-1, spoiled] = bad
        got = layer(x)
        assert not got[-1].isfinite().any()
        assert torch.equal(got[:-1], clean[:-1])


@every_level
@every_dtype
def test_no_rows_and_zeros(isa: str, dtype: torch.dtype) -> None:
    packed, _ = random_dense(40, 64, dtype, torch.Generator().manual_seed(5))
    layer = NativeLinear(workspace(isa), [packed])
    assert layer(torch.zeros(0, 64)).shape == (0, 40)
    assert torch.equal(layer(torch.zeros(9, 64)), torch.zeros(9, 40))


@every_dtype
def test_parts_pack_as_the_whole_and_rows_come_back(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    for rows, cols in SHAPES:
        weight = torch.randn(rows, cols, generator=generator).to(dtype)
        whole = pack_dense(library(), [weight], (rows, cols), dtype)
        parts = pack_dense(library(), torch.split(weight, 16), (rows, cols), dtype)
        assert torch.equal(whole.data, parts.data)
        assert (whole.format, whole.dense_dtype) == (str(dtype).removeprefix("torch."), dtype)
        assert (
            whole.num_bytes
            == -(-rows // 16) * 16 * (cols + (cols % 2 if dtype != torch.float32 else 0)) * dtype.itemsize
        )
        wanted = torch.randint(0, rows, (9,), generator=generator)
        assert torch.equal(unpack_rows(whole, wanted), weight[wanted])


@every_dtype
@every_level
def test_rows_are_decoded(dtype: torch.dtype, isa: str) -> None:
    native, generator = library(isa), torch.Generator().manual_seed(8)
    for rows, cols in SHAPES:
        weight = torch.randn(rows, cols, generator=generator).to(dtype)
        packed = pack_dense(native, [weight], (rows, cols), dtype)
        for wanted in (torch.randint(0, rows, (9,), generator=generator), torch.empty(0, dtype=torch.int64)):
            assert torch.equal(decode_rows(native, packed, wanted, num_threads=2), weight[wanted].float())
        for missing in (-1, rows):
            with pytest.raises(IndexError, match="below"):
                decode_rows(native, packed, torch.tensor([missing]))


@every_dtype
@every_level
def test_numbers_are_rounded_while_they_are_packed(dtype: torch.dtype, isa: str) -> None:
    native, generator = workspace(isa).library, torch.Generator().manual_seed(7)
    for rows, cols in SHAPES:
        # Of every magnitude, down to subnormal ones of float16 and beyond its largest.
        exponents = torch.randint(-30, 18, (rows, cols), generator=generator)
        weight = torch.ldexp(torch.randn(rows, cols, generator=generator), exponents)
        for stored in DENSE_TYPES:
            values = weight.to(stored)
            packed = pack_dense(native, [values], (rows, cols), dtype, num_threads=1)
            assert torch.equal(unpack_rows(packed, torch.arange(rows)), values.to(dtype))


def test_what_cannot_be_packed_or_joined() -> None:
    weight = torch.randn(32, 64)
    with pytest.raises(ConfigError, match=r"weight\.dtype"):
        pack_dense(library(), [weight.double()], (32, 64), torch.float64)
    for parts in ([weight[:8], weight[8:]], [weight, weight], [weight.double()], [weight[:, :32]], [weight[:16]]):
        with pytest.raises(ConfigError, match="part"):
            pack_dense(library(), parts, (32, 64), torch.float32)
    packed = [pack_dense(library(), [weight.to(dtype)], (32, 64), dtype) for dtype in DENSE_TYPES]
    with pytest.raises(ConfigError, match="weights"):
        NativeLinear(workspace(), packed)

"""Compare Hadamard-transformed int8 weights and native products with them with float64 algebra and the torch
reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from native_weights import (
    IQ4_NL,
    Q2_K,
    check_scales,
    every_level,
    every_type,
    hadamard,
    hadamard_int8,
    library,
    needs_library,
    random_matrix,
    rotate,
    workspace,
)
from paged_sdk.errors import CheckpointError, ConfigError
from paged_sdk.kernels.gguf_blocks import BLOCK_FORMATS, BlockMatrix
from paged_sdk.kernels.hadamard import hadamard_quantize
from paged_sdk.kernels.native.hadamard import hadamard_from_blocks, hadamard_from_packed
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.packed import HADAMARD_INT8, PackedWeight, pack_gguf

pytestmark = needs_library

FLOAT32 = 0
DTYPES = [torch.float32, torch.bfloat16]
# Sums are exact integers, but a code on a rounding boundary falls either way: one in some ten thousand, by one step.
SCHEME = 1e-3

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Blocks of 32, 64, 128 and 256; one panel, three, four and five, the last of them whole or not.
every_shape = pytest.mark.parametrize(
    ("rows", "cols"), [(1, 96), (16, 64), (48, 32), (40, 192), (75, 384), (64, 512), (37, 1536)], ids=str
)


def plain(weight: Tensor) -> BlockMatrix:
    """Return a matrix of float32, as a file may have one."""
    return BlockMatrix(FLOAT32, weight.contiguous().view(torch.uint8))


def packed(matrix: BlockMatrix) -> PackedWeight:
    return pack_gguf(library(), matrix.blocks, matrix.tensor_type, *matrix.shape, num_threads=1)


def random_plain(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Draw a float32 matrix with channels that stand out."""
    weight = torch.randn(rows, cols, generator=generator)
    weight[:, ::17] *= 20
    return weight


def unpacked(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Return codes int8 [padded rows, columns] and scales [padded rows] of panels in the Hadamard form."""
    panels = weight.data.view(-1, 64 + 16 * weight.cols)
    codes = (panels[:, 64:].short() - 128).to(torch.int8).view(len(panels), -1, 16, 4)
    return codes.transpose(1, 2).reshape(-1, weight.cols), panels[:, :64].contiguous().view(torch.float32).flatten()


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def reference_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by torch's own Hadamard form."""
    (codes, scales), (weight_codes, weight_scales) = (hadamard_quantize(rows) for rows in (x, weight))
    return codes.double() @ weight_codes.double().T * scales.double()[:, None] * weight_scales.double()


def butterflies(cols: int) -> int:
    """Return how often a term is rounded in the fast transform of a block: once in each of its log2(block) additions.

    Decoding adds nothing. A block's scale has 11 bits and up to 7 more of its sub-block, a code has 8, or up to 6 where
    there are 7 more: their product is exact in float32, and the one rounding left, where a minimum is subtracted, falls
    alike in `BlockMatrix.decoded`, which the test starts from.
    """
    return int(math.log2(math.gcd(cols, 256)))


def check_codes(weight: PackedWeight, values: Tensor) -> None:
    """Check that codes are the nearest, but for ties, that scales are as near as their roundings let them be, and that
    rows past the last are zero.
    """
    rows = len(values)
    assert (weight.format, weight.rows, weight.cols) == ("Hadamard int8", *values.shape)
    assert weight.num_bytes == -(-rows // 16) * 16 * (weight.cols + 4)
    codes, scales = unpacked(weight)
    check_scales(scales[:rows], values, butterflies(values.shape[1]))
    rotated = rotate(values)
    # In codes, of which a row's largest is 127, the same bound comes to less than 1e-3.
    exact = rotated / (rotated.abs().amax(-1, keepdim=True) / 127)
    assert ((codes[:rows].double() - exact).abs() < 0.501).all()
    assert (codes[:rows].abs().amax(-1) == 127).all()
    assert (codes[rows:] == 0).all()
    assert (scales[rows:] == 0).all()


@every_level
@every_type
def test_weights_of_every_packable_type(isa: str, tensor_type: int) -> None:
    generator = torch.Generator().manual_seed(tensor_type)
    block = BLOCK_FORMATS[tensor_type].elements
    for rows, cols in ((1, block), (16, 2 * block), (75, 3 * block), (40, 768)):
        matrix = random_matrix(tensor_type, rows, cols, generator)
        weight = hadamard_from_packed(library(isa), packed(matrix), num_threads=1)
        check_codes(weight, matrix.decoded())
        assert torch.equal(hadamard_from_packed(library(isa), packed(matrix), num_threads=2).data, weight.data)
        check_codes(hadamard_from_blocks(library(isa), matrix, num_threads=1), matrix.decoded())


@every_level
@every_shape
def test_rows_of_plain_numbers(isa: str, rows: int, cols: int) -> None:
    values = random_plain(rows, cols, torch.Generator().manual_seed(cols))
    check_codes(hadamard_from_blocks(library(isa), plain(values), num_threads=1), values)


@pytest.mark.parametrize("tensor_type", [FLOAT32, Q2_K, IQ4_NL], ids=lambda number: BLOCK_FORMATS[number].name)
def test_more_rows_than_are_decoded_at_once(tensor_type: int) -> None:
    generator = torch.Generator().manual_seed(tensor_type)
    matrix = plain(random_plain(2100, 256, generator))
    if tensor_type != FLOAT32:
        matrix = random_matrix(tensor_type, 2100, 256, generator)
    weight = hadamard_from_blocks(library(), matrix, num_threads=2)
    check_codes(weight, matrix.decoded())
    for first in (0, 1008, 1024, 2096):
        part = hadamard_from_blocks(library(), BlockMatrix(tensor_type, matrix.blocks[first : first + 16]))
        assert torch.equal(weight.data.view(-1, 16 * 260)[first // 16], part.data)


def test_weights_that_are_zero_or_not_finite() -> None:
    """Rows of their own, as in torch."""
    values = random_plain(20, 64, torch.Generator().manual_seed(0))
    values[3], values[5, 7], values[18, 40] = 0, torch.nan, torch.inf
    weight = hadamard_from_blocks(library(), plain(values))
    _, scales = unpacked(weight)
    check_scales(scales[:20], values, butterflies(64))
    product = NativeLinear(workspace(), [weight])(torch.ones(7, 64))
    assert product.isnan().any(0).nonzero().flatten().tolist() == [5, 18]
    assert (product[:, 3] == 0).all()


@every_level
@every_dtype
@every_shape
def test_products_of_every_number_of_rows(isa: str, rows: int, cols: int, dtype: torch.dtype) -> None:
    """Each as near as its rounding lets it, and none other than the row alone or on one thread more."""
    generator = torch.Generator().manual_seed(cols)
    values = random_plain(rows, cols, generator)
    weight = hadamard_from_blocks(library(isa), plain(values), num_threads=1)
    one, two = (NativeLinear(workspace(isa, num_threads), [weight]) for num_threads in (1, 2))
    x = random_plain(70, cols, generator).to(dtype)
    whole = one(x)
    assert (whole.dtype, whole.shape) == (dtype, (70, rows))
    tolerance = SCHEME if dtype == torch.float32 else 4e-3
    assert relative(whole, reference_product(x, values)) < tolerance
    assert relative(whole, hadamard_int8(x) @ hadamard_int8(values).T) < tolerance
    for num_rows in (*range(1, 18), 31, 70):  # every part of a tile, and mixtures
        for layer in (one, two):
            assert torch.equal(layer(x[:num_rows]), whole[:num_rows])
    for row in (0, 7, 16, 69):
        assert torch.equal(one(x[row : row + 1]), whole[row : row + 1])


@every_level
@pytest.mark.parametrize("cols", [64, 256, 832])
def test_integers_are_exact(isa: str, cols: int) -> None:
    """Rows whose rotation has whole numbers, at the ends of their range: products are integers that float32 holds."""
    generator = torch.Generator().manual_seed(cols)

    def whole_numbers(rows: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(-127, 128, (rows, cols), generator=generator)
        codes[::2] = torch.where(codes[::2] < 0, -127, 127)
        codes[:, 0] = 127
        return codes, (torch.unflatten(codes.double(), -1, (-1, block)) @ hadamard(block)).flatten(-2).float()

    block = min(cols & -cols, 256)  # whose square root is whole, so that nothing is rounded
    (x_codes, x), (weight_codes, values) = whole_numbers(19), whole_numbers(43)
    x_codes[1], x[1] = weight_codes[0], values[0]  # the largest sum
    weight = hadamard_from_blocks(library(isa), plain(values))
    assert torch.equal(unpacked(weight)[0][:43], weight_codes.to(torch.int8))
    expected = x_codes @ weight_codes.T
    assert expected.max() == 127**2 * cols < 2**24
    assert torch.equal(NativeLinear(workspace(isa, 2), [weight])(x), expected.float())


@every_level
@every_dtype
def test_norm_biases_residual_and_several_weights(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    heights, cols = (64, 19, 1, 33), 192
    values = [random_plain(rows, cols, generator) for rows in heights]
    weights = [hadamard_from_blocks(library(isa), plain(each)) for each in values]
    width = sum(heights)
    biases = [torch.randn(64, generator=generator), None, None, torch.randn(33, generator=generator).bfloat16()]
    bias = torch.cat([torch.zeros(n) if b is None else b for n, b in zip(heights, biases, strict=True)])
    norm = 1 + 0.1 * torch.randn(cols, generator=generator)
    x = (3 * torch.randn(21, cols + 16, generator=generator)).to(dtype)[:, :cols]  # rows with a stride
    wide = torch.randn(21, width + 5, generator=generator).to(dtype)
    before, residual = wide.double(), wide[:, :width]
    normed = hadamard_int8(F.rms_norm(x.double(), (cols,), norm.double(), 1e-3))
    expected = normed @ torch.cat([hadamard_int8(each) for each in values]).T + bias
    tolerance = 4e-3 if dtype == torch.bfloat16 else SCHEME
    one, two = (
        NativeLinear(workspace(isa, num_threads), weights, biases=biases, norm_weight=norm, norm_eps=1e-3)
        for num_threads in (1, 2)
    )
    got = one(x)
    assert relative(got, expected) < tolerance
    assert torch.equal(two(x), got)
    assert one(x, residual=residual, out=residual) is residual
    assert relative(residual, expected + before[:, :width]) < tolerance
    assert torch.equal(wide[:, width:].double(), before[:, width:])
    first = 0
    for weight, each in zip(weights, biases, strict=True):
        alone = NativeLinear(workspace(isa), [weight], biases=[each], norm_weight=norm, norm_eps=1e-3)
        assert torch.equal(alone(x), got[:, first : first + weight.rows])
        first += weight.rows


@every_level
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(isa: str, bad: float) -> None:
    generator = torch.Generator().manual_seed(9)
    weight = hadamard_from_blocks(library(isa), plain(random_plain(40, 512, generator)))
    x = torch.randn(5, 512, generator=generator)
    for norm in (None, torch.ones(512)):
        layer = NativeLinear(workspace(isa), [weight], norm_weight=norm)
        clean, spoiled = layer(x), x.clone()
        spoiled[2, 300] = bad
        got = layer(spoiled)
        assert got[2].isnan().all()
        others = torch.tensor([0, 1, 3, 4])
        assert torch.equal(got[others], clean[others])


@every_level
def test_zero_and_tiny_and_huge_activations_and_none(isa: str) -> None:
    generator = torch.Generator().manual_seed(11)
    values, bias = random_plain(40, 64, generator), torch.randn(40, generator=generator)
    weight = hadamard_from_blocks(library(isa), plain(values))
    layer = NativeLinear(workspace(isa), [weight], biases=[bias])
    assert torch.equal(layer(torch.zeros(2, 64)), bias.expand(2, -1))
    assert torch.equal(layer(torch.full((1, 64), 1e-40)), bias[None])
    assert layer(torch.zeros(0, 64)).shape == (0, 40)
    x = torch.randn(3, 64, generator=generator)
    for factor in (1e-20, 1e30):
        got = NativeLinear(workspace(isa), [weight])(x * factor)
        assert relative(got, reference_product(x * factor, values)) < SCHEME


def test_what_does_not_fit_is_refused() -> None:
    generator = torch.Generator().manual_seed(1)
    source = packed(random_matrix(2, 32, 64, generator))
    weight = hadamard_from_packed(library(), source)
    assert weight.tensor_type == HADAMARD_INT8
    wider = hadamard_from_blocks(library(), plain(torch.zeros(32, 96)))
    layer = NativeLinear(workspace(), [weight])
    x = torch.zeros(3, 64)
    calls: list[Callable[[], object]] = [
        lambda: hadamard_from_packed(library(), weight),
        lambda: NativeLinear(workspace(), [weight, wider]),
        lambda: NativeLinear(workspace(), [weight, source]),
        lambda: NativeLinear(workspace(), [source, weight]),
        lambda: layer(torch.zeros(3, 65)),
        lambda: layer(x.double()),
        lambda: layer(torch.zeros(64, 3).T),
        lambda: layer(x, residual=torch.zeros(3, 31)),
        lambda: layer(x, out=torch.zeros(3, 32, dtype=torch.bfloat16)),
    ]
    for call in calls:
        with pytest.raises(ConfigError):
            call()
    with pytest.raises(CheckpointError, match="20 x 48 cannot be rotated: columns must be a multiple of 32"):
        hadamard_from_blocks(library(), plain(torch.zeros(20, 48)))

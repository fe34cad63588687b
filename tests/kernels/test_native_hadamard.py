"""Compare native products of many rows, in int8 codes of Hadamard transforms, with float64 algebra."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from native_weights import (
    HALVES,
    TYPES,
    code_scales,
    every_level,
    every_type,
    hadamard_rows,
    hadamard_weight,
    library,
    needs_library,
    random_blocks,
    random_matrix,
    random_weight,
    transform_groups,
    workspace,
)
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.library import available_levels
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.packed import PackedWeight, pack_dense, pack_gguf
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, dequantize

pytestmark = needs_library

Q4_1, Q8_0, Q4_K = 3, 8, 12
DTYPES = [torch.float32, torch.bfloat16]
# Sums are exact integers, but a code on a rounding boundary falls either way: one in some ten thousand, by one step.
SCHEME = 1e-3
# A weight's code is off by half a step where it is rounded, and by a quarter where the factor of its group is: 16 bits,
# of which the coefficients that it multiplies have up to 15. Formats of two scales a group round once more.
WEIGHT_STEPS = 0.8

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Whole and broken blocks of 256 columns; one panel, three, four and five, the last of them whole or not.
every_shape = pytest.mark.parametrize(
    ("rows", "cols"), [(1, 96), (16, 64), (48, 32), (40, 288), (75, 384), (64, 512), (37, 1536)], ids=str
)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def outlying(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Draw rows with channels that stand out."""
    x = torch.randn(rows, cols, generator=generator)
    x[:, ::17] *= 20
    return x


def check_weight(weight: PackedWeight, values: Tensor, isa: str) -> None:
    """Check that weights as they are multiplied are near their transform."""
    expected = transform_groups(values)
    steps = (hadamard_weight(weight, isa) - expected) / code_scales(expected).clamp_min(1e-300)
    assert steps.abs().max() < WEIGHT_STEPS
    if steps.numel() > 10_000:  # a tenth more than rounding to the nearest code
        assert steps.square().mean() < 1.1 / 12


@every_level
@every_type
def test_weights_of_every_packable_type(isa: str, tensor_type: int) -> None:
    generator = torch.Generator().manual_seed(tensor_type)
    block = BLOCK_FORMATS[tensor_type].elements
    for rows, cols in ((1, block), (16, 2 * block), (75, 3 * block), (40, 768)):
        weight, values = random_weight(tensor_type, rows, cols, generator)
        check_weight(weight, values, isa)


@every_type
@pytest.mark.parametrize("fill", ["zeros", "ones", "either"])
def test_codes_at_the_ends_of_their_range(tensor_type: int, fill: str) -> None:
    """The largest sums of the transform, in which 8 and 16 bits are used up."""
    generator = torch.Generator().manual_seed(0)
    blocks = random_blocks(tensor_type, 32, 512, generator)
    kept = blocks.clone()
    either = torch.randint(0, 2, blocks.shape, generator=generator, dtype=torch.uint8) * 255
    if tensor_type == Q8_0:
        either = either // 255 + 127  # the bytes of 127 and -128
    blocks[:] = {"zeros": torch.zeros_like(blocks), "ones": torch.full_like(blocks, 255), "either": either}[fill]
    form = BLOCK_FORMATS[tensor_type]
    for offset in HALVES[tensor_type]:
        starts = torch.arange(0, blocks.shape[1], form.num_bytes) + offset
        for byte in (0, 1):
            blocks[:, starts + byte] = kept[:, starts + byte]
    weight = pack_gguf(library(), blocks, tensor_type, 32, 512, num_threads=1)
    for isa in available_levels():
        expected = transform_groups(dequantize(tensor_type, blocks))
        steps = (hadamard_weight(weight, isa) - expected) / code_scales(expected).clamp_min(1e-300)
        assert steps.abs().max() < WEIGHT_STEPS


@every_type
def test_every_instruction_set_makes_the_same_codes(tensor_type: int) -> None:
    weight, _ = random_weight(tensor_type, 40, 768, torch.Generator().manual_seed(1))
    first, *others = (hadamard_weight(weight, isa) for isa in available_levels())
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("tensor_type", [Q4_1, Q8_0])
def test_groups_whose_scales_are_far_apart(tensor_type: int) -> None:
    """Small groups beside large ones are as near as one scale lets them be; rows of zeros are zero."""
    generator = torch.Generator().manual_seed(2)
    blocks = random_blocks(tensor_type, 16, 512, generator)
    size = BLOCK_FORMATS[tensor_type].num_bytes
    for offset in HALVES[tensor_type]:
        for group in range(0, 16, 3):
            at = group * size + offset
            halves = blocks[:, at : at + 2].contiguous().view(torch.float16)
            blocks[:, at : at + 2] = (halves * 1e-3).view(torch.uint8)
        for group in range(16):
            blocks[3, group * size + offset : group * size + offset + 2] = 0
    weight, values = pack_gguf(library(), blocks, tensor_type, 16, 512), dequantize(tensor_type, blocks)
    for isa in available_levels():
        expected, got = transform_groups(values), hadamard_weight(weight, isa)
        assert (got[3] == 0).all()
        assert ((got - expected).abs() <= WEIGHT_STEPS * code_scales(expected)).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@every_type
def test_weights_that_are_not_finite_stay_in_their_output(tensor_type: int, bad: float) -> None:
    blocks = random_blocks(tensor_type, 20, 512, torch.Generator().manual_seed(3))
    offset = HALVES[tensor_type][0]
    blocks[5, offset : offset + 2] = torch.tensor([bad]).half().view(torch.uint8)
    weight = pack_gguf(library(), blocks, tensor_type, 20, 512).hadamard_form()
    for isa in available_levels():
        product = NativeLinear(workspace(isa), [weight])(torch.ones(7, 512))
        assert product.isfinite().logical_not().any(0).nonzero().flatten().tolist() == [5]


@every_level
@every_dtype
@every_shape
def test_products_of_every_number_of_rows(isa: str, rows: int, cols: int, dtype: torch.dtype) -> None:
    """Each as near as its rounding lets it, and none other than the row alone or on one thread more."""
    generator = torch.Generator().manual_seed(cols)
    weight, _ = random_weight(Q4_1, rows, cols, generator)
    one, two = (NativeLinear(workspace(isa, num_threads), [weight.hadamard_form()]) for num_threads in (1, 2))
    x = outlying(70, cols, generator).to(dtype)
    whole = one(x)
    assert (whole.dtype, whole.shape) == (dtype, (70, rows))
    tolerance = SCHEME if dtype == torch.float32 else 4e-3
    assert relative(whole, hadamard_rows(x) @ hadamard_weight(weight, isa).T) < tolerance
    for num_rows in (*range(1, 18), 31, 70):  # every part of a tile, and mixtures
        for layer in (one, two):
            assert torch.equal(layer(x[:num_rows]), whole[:num_rows])
    for row in (0, 7, 16, 69):
        assert torch.equal(one(x[row : row + 1]), whole[row : row + 1])


@every_level
def test_the_product_with_the_decoded_weights(isa: str) -> None:
    """Two roundings to 127 codes cost 1 %; more where random minima give weights a mean, which trained ones do not
    have, and so one large column of 32.
    """
    generator = torch.Generator().manual_seed(4)
    for tensor_type in TYPES:
        matrix = random_matrix(tensor_type, 40, 1024, generator)
        values = matrix.decoded().double()
        weight = pack_gguf(library(), matrix.blocks, tensor_type, 40, 1024)
        x = torch.randn(9, 1024, generator=generator)
        got = NativeLinear(workspace(isa), [weight.hadamard_form()])(x)
        limit = 0.03 if len(HALVES[tensor_type]) == 2 else 0.015
        assert relative(got, x.double() @ values.T) < limit, BLOCK_FORMATS[tensor_type].name


@every_level
@every_dtype
def test_norm_biases_residual_and_several_weights(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    heights, cols = (64, 19, 1, 33), 768
    types = (Q4_1, Q8_0, Q4_K, Q8_0)
    weights = [
        random_weight(number, rows, cols, generator)[0].hadamard_form()
        for number, rows in zip(types, heights, strict=True)
    ]
    width = sum(heights)
    biases = [torch.randn(64, generator=generator), None, None, torch.randn(33, generator=generator).bfloat16()]
    bias = torch.cat([torch.zeros(n) if b is None else b for n, b in zip(heights, biases, strict=True)])
    norm = 1 + 0.1 * torch.randn(cols, generator=generator)
    x = (3 * torch.randn(21, cols + 16, generator=generator)).to(dtype)[:, :cols]  # rows with a stride
    wide = torch.randn(21, width + 5, generator=generator).to(dtype)
    before, residual = wide.double(), wide[:, :width]
    normed = hadamard_rows(F.rms_norm(x.double(), (cols,), norm.double(), 1e-3))
    expected = normed @ torch.cat([hadamard_weight(each, isa) for each in weights]).T + bias
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
    weight = random_weight(Q8_0, 40, 512, generator)[0].hadamard_form()
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
    weight, _ = random_weight(Q8_0, 40, 64, generator)
    bias = torch.randn(40, generator=generator)
    layer = NativeLinear(workspace(isa), [weight.hadamard_form()], biases=[bias])
    assert torch.equal(layer(torch.zeros(2, 64)), bias.expand(2, -1))
    assert torch.equal(layer(torch.full((1, 64), 1e-40)), bias[None])
    assert layer(torch.zeros(0, 64)).shape == (0, 40)
    x = torch.randn(3, 64, generator=generator)
    for factor in (1e-20, 1e30):
        got = NativeLinear(workspace(isa), [weight.hadamard_form()])(x * factor)
        assert relative(got, hadamard_rows(x * factor) @ hadamard_weight(weight, isa).T) < SCHEME


def test_both_ways_share_one_memory() -> None:
    weight, _ = random_weight(Q4_1, 32, 64, torch.Generator().manual_seed(1))
    assert weight.hadamard_form().data is weight.data
    assert weight.hadamard_form().num_bytes == weight.num_bytes == 32 * 64 * 5 // 8


def test_what_does_not_fit_is_refused() -> None:
    generator = torch.Generator().manual_seed(1)
    (source, _), (wider, _) = random_weight(2, 32, 64, generator), random_weight(2, 32, 96, generator)
    weight, dense = source.hadamard_form(), pack_dense(library(), [torch.zeros(32, 64)], (32, 64), torch.float32)
    layer = NativeLinear(workspace(), [weight])
    x = torch.zeros(3, 64)
    calls: list[Callable[[], object]] = [
        dense.hadamard_form,
        lambda: NativeLinear(workspace(), [weight, wider.hadamard_form()]),
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

"""Compare native products with grouped matrices with float64 algebra."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from torch import Tensor

from grouped_weights import KINDS, NF4, every_kind, quantized, random_codes
from native_weights import (
    code_scales,
    every_level,
    hadamard_weight,
    library,
    needs_library,
    quantize_activations,
    transform_groups,
    workspace,
)
from paged_sdk.errors import ConfigError, UnsupportedQuantizationError
from paged_sdk.kernels.native.experts import NativeExperts
from paged_sdk.kernels.native.grouped import can_be_packed, decode_grouped, pack_grouped
from paged_sdk.kernels.native.library import available_levels
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.packed import PackedWeight, decode_rows
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix, UnreadGroupedMatrix
from paged_sdk.kernels.quantized.packed_codes import CodeForm, PackedCodes

pytestmark = needs_library

# The scheme itself: int8 activations in groups of 16, exact integer products, float32 sums.
SCHEME = 2e-6
# Half a step of a code, and a quarter from the factor of its group; two scales a group round once more.
WEIGHT_STEPS = 0.8

#: Rows, columns and columns of a group: whole groups and broken ones, one panel and several, the last whole or not.
SHAPES = [(1, 32, 32), (16, 64, 64), (75, 288, 64), (40, 320, 128), (37, 768, 256), (33, 288, 1000)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def make(kind: str, shape: tuple[int, int, int], *, order: bool = False) -> GroupedMatrix:
    rows, cols, group_size = shape
    return random_codes(kind, rows, cols, group_size, torch.Generator().manual_seed(cols), order=order)


def pack(matrix: GroupedMatrix) -> PackedWeight:
    return pack_grouped(library(), [matrix], num_threads=1)


def decoded(weight: PackedWeight) -> Tensor:
    return decode_rows(library(), weight, torch.arange(weight.rows), num_threads=1)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def in_order(x: Tensor, matrix: GroupedMatrix) -> Tensor:
    """Quantize activations in the order in which the matrix has its columns."""
    if matrix.order is None:
        return quantize_activations(x)
    return torch.empty(x.shape, dtype=torch.float64).index_copy_(
        1, matrix.order, quantize_activations(x[:, matrix.order])
    )


@every_kind
@every_shape
def test_weights_keep_their_values(kind: str, shape: tuple[int, int, int]) -> None:
    matrix = make(kind, shape, order=True)
    values = decoded(pack(matrix))
    if kind == "nf4":  # half a step of 124, and a little more where steps are not those of the largest level
        scales = matrix.scales.abs().amax(1, keepdim=True)
        assert ((values - matrix.decoded()).abs() <= 0.6 / 124 * scales).all()
    else:
        torch.testing.assert_close(values, matrix.decoded(), rtol=1e-6, atol=0.0)


@every_level
@every_kind
def test_few_rows_are_multiplied_by_the_weights(isa: str, kind: str) -> None:
    for shape in SHAPES:
        matrix = make(kind, shape, order=True)
        weight = pack(matrix)
        layer, values = NativeLinear(workspace(isa), [weight]), decoded(weight).double()
        x = torch.randn(33, shape[1], generator=torch.Generator().manual_seed(1))
        for num_rows in (1, 2, 3, 5, 8, 17, 33):
            assert relative(layer(x[:num_rows]), in_order(x[:num_rows], matrix) @ values.T) < SCHEME


@every_level
@every_kind
def test_many_rows_are_multiplied_by_codes_of_their_transform(isa: str, kind: str) -> None:
    for shape in SHAPES:
        matrix = make(kind, shape)
        weight = pack(matrix)
        check_rotated(weight, isa)


def check_rotated(weight: PackedWeight, isa: str) -> None:
    expected = transform_groups(decoded(weight))
    steps = (hadamard_weight(weight, isa) - expected) / code_scales(expected).clamp_min(1e-300)
    assert steps.abs().max() < WEIGHT_STEPS


@every_level
@pytest.mark.parametrize("cols", [64, 48 + 32, 96])
def test_groups_of_16_columns(isa: str, cols: int) -> None:
    """Those of NVFP4, also where a row has an odd number of them."""
    matrix = random_codes("e2m1", 20, cols - cols % 32, 16, torch.Generator().manual_seed(0))
    weight = pack(matrix)
    torch.testing.assert_close(decoded(weight), matrix.decoded(), rtol=1e-6, atol=0.0)
    x = torch.randn(5, weight.cols, generator=torch.Generator().manual_seed(1))
    got = NativeLinear(workspace(isa), [weight])(x)
    assert relative(got, quantize_activations(x) @ matrix.decoded().double().T) < SCHEME
    check_rotated(weight, isa)


@every_kind
@pytest.mark.parametrize("fill", ["lowest", "highest", "either"])
def test_codes_at_the_ends_of_their_range(kind: str, fill: str) -> None:
    """The largest sums of the transform, in which 8 and 16 bits are used up."""
    matrix = make(kind, (32, 512, 128))
    most = (1 << matrix.bits) - 1
    either = torch.randint(0, 2, matrix.codes.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    codes = {"lowest": torch.zeros_like(either), "highest": torch.full_like(either, most), "either": either * most}
    weight = pack(evolve(matrix, codes=codes[fill]))
    for isa in available_levels():
        check_rotated(weight, isa)


@every_kind
def test_one_arithmetic_for_every_number_of_rows_threads_and_instruction_set(kind: str) -> None:
    matrix = make(kind, (75, 288, 64), order=True)
    x = torch.randn(33, 288, generator=torch.Generator().manual_seed(2))
    norm = torch.rand(288, generator=torch.Generator().manual_seed(3))
    for weight in (pack(matrix), pack(matrix).hadamard_form()):
        results = []
        for isa in available_levels():
            layers = [NativeLinear(workspace(isa, threads), [weight], norm_weight=norm) for threads in (1, 2)]
            expected = torch.cat([layers[0](x[row : row + 1]) for row in range(33)])
            for layer in layers:
                for num_rows in (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33):
                    assert torch.equal(layer(x[:num_rows]), expected[:num_rows])
            results.append(expected)
        assert all(relative(each, results[0]) < 1e-2 for each in results)


@every_level
@pytest.mark.parametrize("in_hadamard", [False, True])
def test_columns_in_another_order_are_those_of_the_input(isa: str, in_hadamard: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    plain = make("4 bits", (48, 256, 64))
    order = torch.randperm(256, generator=generator)
    x, norm = torch.randn(6, 256, generator=generator), torch.rand(256, generator=generator)

    def form(matrix: GroupedMatrix) -> PackedWeight:
        return pack(matrix).hadamard_form() if in_hadamard else pack(matrix)

    shuffled = torch.empty_like(x).index_copy_(1, order, x)
    expected = NativeLinear(workspace(isa), [form(plain)])(x)
    weight = form(evolve(plain, order=order))
    assert torch.equal(NativeLinear(workspace(isa), [weight])(shuffled), expected)
    # With a norm, the sum of squares is taken in the order of the input.
    normed = NativeLinear(workspace(isa), [form(plain)], norm_weight=norm[order])(x)
    got = NativeLinear(workspace(isa), [weight], norm_weight=norm)(shuffled)
    assert relative(got, normed) < 1e-3


def test_orders_of_one_input_have_to_be_the_same() -> None:
    generator = torch.Generator().manual_seed(5)
    one, other = (random_codes("4 bits", 32, 64, 32, generator, order=True) for _ in range(2))
    with pytest.raises(ConfigError, match="order"):
        NativeLinear(workspace(), [pack(one), pack(other)])
    with pytest.raises(ConfigError, match="order"):
        NativeExperts(
            workspace(), *(pack(random_codes("4 bits", 64, 64, 32, generator, order=True)),) * 3, num_experts=1
        )


@every_kind
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_stay_in_their_output(kind: str, bad: float) -> None:
    matrix = make(kind, (20, 256, 64))
    scales = matrix.scales.clone()
    scales[5, 1] = bad
    weight = pack(evolve(matrix, scales=scales))
    for isa in available_levels():
        for form in (weight, weight.hadamard_form()):
            product = NativeLinear(workspace(isa), [form])(torch.rand(7, 256))
            assert product.isfinite().logical_not().any(0).nonzero().flatten().tolist() == [5]


@every_level
@pytest.mark.parametrize("group", [0, 1], ids=["first half", "second half"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_scale_of_16_columns_that_is_not_finite_stays_in_its_output(isa: str, bad: float, group: int) -> None:
    matrix = make("e2m1", (20, 256, 16))
    scales = matrix.scales.clone()
    scales[5, group] = bad
    weight = pack(evolve(matrix, scales=scales))
    for form in (weight, weight.hadamard_form()):
        product = NativeLinear(workspace(isa), [form])(torch.rand(7, 256))
        assert product.isfinite().logical_not().any(0).nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize(("bits", "stored"), [(1, 2), (3, 4), (4, 8), (7, 8)])
def test_stored_bits_above_a_codes_own_count_for_nothing(bits: int, stored: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    words = torch.randint(0, 256, (16, 64 * stored // 8), generator=generator, dtype=torch.uint8)
    matrix = GroupedMatrix(
        codes=PackedCodes(words=words, form=CodeForm.STREAM, shape=(16, 64), bits=stored),
        scales=torch.rand(16, 2, generator=generator),
        minima=torch.rand(16, 2, generator=generator),
        group_size=32,
        bits=bits,
    )
    torch.testing.assert_close(decode_grouped(library(), matrix), matrix.decoded())
    whole = evolve(matrix, codes=matrix.codes & ((1 << bits) - 1))
    assert torch.equal(pack(matrix).data, pack(whole).data)


@pytest.mark.parametrize(
    ("bits", "group_size", "expected"), [(4, 128, 4.25), (4, 64, 4.5), (3, 128, 3.25), (8, 128, 8.25)]
)
def test_bits_of_a_weight(bits: int, group_size: int, expected: float) -> None:
    rows, cols = 32, 4096
    matrix = random_codes(f"{bits} bits", rows, cols, group_size, torch.Generator().manual_seed(0))
    assert pack(matrix).num_bytes * 8 / (rows * cols) == pytest.approx(expected + 128 * 8 / (16 * cols))
    assert pack(matrix).num_bytes <= matrix.num_bytes * 1.01


def test_scales_and_minima_of_float32_are_rounded_to_11_bits() -> None:
    generator = torch.Generator().manual_seed(6)
    scales = torch.rand(32, 8, generator=generator) + 0.01
    minima = torch.randn(32, 8, generator=generator)
    matrix = evolve(make("4 bits", (32, 256, 32)), scales=scales, minima=minima)
    bound = 2.0**-11 * (15 * scales + minima.abs()).repeat_interleave(32, dim=1)
    assert ((decoded(pack(matrix)) - matrix.decoded()).abs() <= bound).all()
    for factor in (2.0**-60, 2.0**60):
        tiny = evolve(matrix, scales=scales * factor, minima=minima * factor)
        assert torch.equal(decoded(pack(tiny)), decoded(pack(matrix)) * factor)
    whole = evolve(make("int8", (32, 256, 256)), scales=scales[:, :1])
    torch.testing.assert_close(decoded(pack(whole)), whole.decoded(), rtol=1e-6, atol=0.0)


def test_zero_points_of_zero_scales_and_minima_without_scales() -> None:
    matrix = make("4 bits", (3, 64, 32))
    scales = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.5]])
    minima = torch.tensor([[0.0, -8.0], [0.0, 0.0], [0.25, -3.0]])
    constant = evolve(matrix, scales=scales, minima=minima)
    assert torch.equal(decoded(pack(constant)), constant.decoded())


def test_rounded_levels_of_nf4_are_a_small_part_of_its_own_error() -> None:
    weight = torch.randn(64, 4096, generator=torch.Generator().manual_seed(7))
    levels, groups = torch.tensor(NF4), weight.view(64, -1, 64)
    scales = groups.abs().amax(2)
    codes = (groups / scales[:, :, None]).reshape(64, -1)
    nearest = torch.bucketize(codes, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    matrix = GroupedMatrix(codes=nearest, scales=scales.half().float(), group_size=64, levels=levels)
    own, added = relative(matrix.decoded(), weight), relative(decoded(pack(matrix)), matrix.decoded())
    assert added**2 < 0.003 * own**2


def test_rows_that_are_read_later_give_the_same() -> None:
    matrix = random_codes("4 bits", 1040, 1024, 128, torch.Generator().manual_seed(8), order=True)
    seen = list[tuple[int, int]]()

    def read(first: int, last: int) -> GroupedMatrix:
        seen.append((first, last))
        return matrix.rows(slice(first, last))

    unread = UnreadGroupedMatrix(
        shape=matrix.shape, read=read, group_size=128, has_minima=True, bits=4, order=matrix.order
    )
    assert torch.equal(pack_grouped(library(), [unread]).data, pack(matrix).data)
    assert seen == [(0, 512), (512, 1024), (1024, 1040)]
    halves = [matrix.rows(slice(0, 528)), matrix.rows(slice(528, None))]
    assert torch.equal(pack_grouped(library(), halves).data, pack(matrix).data)


@pytest.mark.parametrize(
    "matrix",
    [
        random_codes("4 bits", 16, 48, 16, torch.Generator().manual_seed(0)),  # columns
        random_codes("4 bits", 16, 64, 16, torch.Generator().manual_seed(0)),  # columns of a group
        random_codes("nf4", 16, 96, 48, torch.Generator().manual_seed(0)),
        evolve(random_codes("nf4", 16, 64, 32, torch.Generator().manual_seed(0)), minima=torch.ones(16, 2)),
        GroupedMatrix(  # levels
            codes=torch.zeros(16, 64, dtype=torch.uint8),
            scales=torch.ones(16, 1),
            group_size=64,
            levels=torch.randn(32),
        ),
    ],
    ids=["columns", "group", "broken levels", "minima of levels", "32 levels"],
)
def test_what_has_no_packed_form(matrix: GroupedMatrix) -> None:
    assert not can_be_packed([matrix])
    with pytest.raises(UnsupportedQuantizationError, match="cannot be packed"):
        pack(matrix)


def test_stacks_have_to_be_alike() -> None:
    generator = torch.Generator().manual_seed(9)
    first = random_codes("4 bits", 32, 64, 32, generator)
    fewer = random_codes("2 bits", 32, 64, 32, generator)
    assert torch.equal(decoded(pack_grouped(library(), [first, fewer])), torch.cat((first.decoded(), fewer.decoded())))
    for other in (
        random_codes("4 bits", 32, 64, 64, generator),
        random_codes("4 bits", 32, 96, 32, generator),
        random_codes("4 bits", 32, 64, 32, generator, order=True),
        random_codes("nf4", 32, 64, 32, generator),
    ):
        assert not can_be_packed([first, other])
    assert not can_be_packed([first.rows(slice(0, 8)), first])


@every_level
def test_experts(isa: str) -> None:
    generator = torch.Generator().manual_seed(10)
    hidden, inner, num_experts = 64, 96, 3
    gate, up, down = (
        [quantized(torch.randn(rows, cols, generator=generator) / math.sqrt(cols)) for _ in range(num_experts)]
        for rows, cols in ((inner, hidden), (inner, hidden), (hidden, inner))
    )
    packed = [pack_grouped(library(), stack) for stack in (gate, up, down)]
    x, ids = torch.randn(5, hidden, generator=generator), torch.randint(0, num_experts, (5, 2), generator=generator)
    shares = torch.rand(5, 2, generator=generator)
    got = NativeExperts(workspace(isa), *packed, num_experts=num_experts)(x, shares, ids)
    expected = torch.zeros_like(x)
    for token in range(5):
        for share, expert in zip(shares[token], ids[token].tolist(), strict=True):
            inside = torch.nn.functional.silu(gate[expert].decoded() @ x[token]) * (up[expert].decoded() @ x[token])
            expected[token] += share * (down[expert].decoded() @ inside)
    assert relative(got, expected) < 0.02


def test_every_kind_is_tested() -> None:
    assert {pack(make(kind, (16, 64, 32))).tensor_type & 15 for kind in KINDS} == {0, 1, 2, 3, 4, 5, 6}

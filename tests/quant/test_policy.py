"""Which form a matrix takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from native_weights import IQ3_S, IQ4_NL, IQ4_XS, TYPES, every_level, needs_library, random_matrix, workspace
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.packed import gains_in_hadamard, unpack_rows
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.quant.dense import DenseLinear
from paged_sdk.quant.hadamard_int8 import HadamardInt8Linear
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.native_block import FEW_ROWS, NativeBlockLinear
from paged_sdk.quant.policy import NamedMatrix, Role, WeightPolicy

# Random blocks have means, which trained weights do not, and one large column after the rotation.
ROTATED_QUANTIZATION = 0.06

Q8_0 = 8

every_kind_of_layer = pytest.mark.parametrize("is_head", [False, True])


def matrices(*tensor_types: int) -> list[BlockMatrix]:
    generator = torch.Generator().manual_seed(0)
    return [random_matrix(number, 16, 256, generator) for number in tensor_types]


def check_shared(layer: NativeBlockLinear) -> None:
    """Check that few and many rows are multiplied by one memory, in two ways where the second one is faster."""
    weights = layer.native_weights
    in_hadamard = gains_in_hadamard(workspace().library, weights.few)
    assert [weight.in_hadamard for weight in weights.few] == [False] * len(weights.few)
    assert [weight.in_hadamard for weight in weights.many] == [in_hadamard] * len(weights.few)
    assert all(many.data is few.data for few, many in zip(weights.few, weights.many, strict=True))


def form(
    policy: WeightPolicy,
    stored: Sequence[StoredMatrix],
    *,
    is_head: bool = False,
    biases: Sequence[Tensor | None] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Linear:
    named = [NamedMatrix(f"matrix.{index}.weight", matrix) for index, matrix in enumerate(stored)]
    role = Role.HEAD if is_head else Role.LINEAR
    return policy.linear(named, biases or [None] * len(stored), role, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_library), False])
def test_a_matrix_of_plain_numbers_is_decoded_with_its_neighbours(*, native: bool) -> None:
    policy = WeightPolicy(keep_blocks=True, workspace=workspace() if native else None)
    dense = DenseMatrix(torch.randn(16, 256, generator=torch.Generator().manual_seed(0)))
    layers: list[list[StoredMatrix]] = [[dense], [*matrices(8), dense, *matrices(12)]]
    for stored in layers:
        layer = form(policy, stored, dtype=torch.bfloat16)
        expected = torch.cat([matrix.decoded(torch.bfloat16) for matrix in stored])
        if native:
            assert layer.native_weights is not None
            packed = [unpack_rows(weight, torch.arange(weight.rows)) for weight in layer.native_weights.few]
            assert torch.equal(torch.cat(packed), expected)
        else:
            assert isinstance(layer, DenseLinear)
            assert torch.equal(layer.weight, expected)


@needs_library
@pytest.mark.parametrize("tensor_type", TYPES)
def test_every_packable_type_is_multiplied_in_one_way_with_few_rows_and_in_another_with_many(tensor_type: int) -> None:
    layer = form(WeightPolicy(keep_blocks=True, workspace=workspace()), matrices(tensor_type))
    assert isinstance(layer, NativeBlockLinear)
    assert [weight.tensor_type for weight in layer.native_weights.few] == [tensor_type]
    check_shared(layer)
    x = torch.randn(FEW_ROWS + 1, 256, generator=torch.Generator().manual_seed(0))
    alone = form(WeightPolicy(keep_blocks=True, workspace=workspace(), one_form=True), matrices(tensor_type))
    assert torch.equal(layer.forward(x[1:], None), alone.forward(x[1:], None))
    assert torch.equal(layer.forward(x, None), NativeLinear(workspace(), layer.native_weights.many)(x))


#: All but Q8_0, whose weights have eight bits
MULTIPLIED_AS_THEY_ARE_BY_AVX2 = set(TYPES) - {8}


@needs_library
@every_level
def test_many_rows_are_rotated_where_most_of_the_matrices_gain(isa: str) -> None:
    policy = WeightPolicy(keep_blocks=True, workspace=workspace(isa))
    stays = MULTIPLIED_AS_THEY_ARE_BY_AVX2 if isa == "avx2" else set()
    cases = [(*[number] * 3, number not in stays) for number in TYPES]
    cases += [(12, 8, 12, not stays), (8, 12, 8, True)]
    for *tensor_types, in_hadamard in cases:
        layer = form(policy, matrices(*tensor_types))
        assert isinstance(layer, NativeBlockLinear)
        assert [weight.in_hadamard for weight in layer.native_weights.many] == [in_hadamard] * 3
        assert (layer.native_weights.many is layer.native_weights.few) == (not in_hadamard)


@needs_library
def test_one_form_and_heads_are_packed_only() -> None:
    stored = matrices(14)
    for layer in (
        form(WeightPolicy(keep_blocks=True, workspace=workspace(), one_form=True), stored),
        form(WeightPolicy(keep_blocks=True, workspace=workspace()), stored, is_head=True),
    ):
        assert isinstance(layer, NativeBlockLinear)
        assert layer.native_weights.many is layer.native_weights.few
        assert layer.num_bytes == stored[0].blocks.nbytes


@needs_library
def test_matrices_of_several_types_are_one_layer() -> None:
    layer = form(WeightPolicy(keep_blocks=True, workspace=workspace()), matrices(12, 12, 14))
    assert isinstance(layer, NativeBlockLinear)
    assert [weight.tensor_type for weight in layer.native_weights.few] == [12, 12, 14]
    check_shared(layer)
    assert layer.out_features == 48


@needs_library
@every_kind_of_layer
@pytest.mark.parametrize("tensor_types", [(IQ3_S,), (12, IQ3_S, 12), (IQ4_XS,), (IQ4_NL,), (12, IQ4_XS, IQ3_S)])
def test_what_has_no_kernel_is_brought_to_a_form_that_has(tensor_types: tuple[int, ...], *, is_head: bool) -> None:
    stored = matrices(*tensor_types)
    layer = form(WeightPolicy(keep_blocks=True, workspace=workspace()), stored, is_head=is_head)
    assert isinstance(layer, NativeBlockLinear)
    for weight, number in zip(layer.native_weights.few, tensor_types, strict=True):
        if number in (IQ4_NL, IQ4_XS):
            assert weight.format == "grouped"
            assert weight.num_bytes == 16 * (256 * 4.5 / 8 + 8)  # two units for each row
        else:
            assert weight.tensor_type == (Q8_0 if number == IQ3_S else number)
    if not is_head:
        check_shared(layer)
    x = torch.randn(FEW_ROWS + 1, 256, generator=torch.Generator().manual_seed(0))
    expected = x @ torch.cat([matrix.decoded() for matrix in stored]).T
    for rows in (x, x[1:]):
        assert (layer.forward(rows, None) - expected[-len(rows) :]).norm() < ROTATED_QUANTIZATION * expected.norm()


@every_kind_of_layer
@pytest.mark.parametrize("tensor_type", [*TYPES, IQ4_XS, IQ4_NL])
def test_without_the_library_torch_serves_every_number_of_rows(tensor_type: int, *, is_head: bool) -> None:
    stored = matrices(tensor_type)
    layer = form(WeightPolicy(keep_blocks=True, workspace=None), stored, is_head=is_head)
    assert isinstance(layer, HadamardInt8Linear)
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, FEW_ROWS + 1):
        x = torch.randn(num_rows, 256, generator=generator)
        expected = x @ stored[0].decoded().T
        assert (layer.forward(x, None) - expected).norm() < ROTATED_QUANTIZATION * expected.norm()


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_library), False])
def test_biases_go_with_their_matrices(*, native: bool) -> None:
    policy = WeightPolicy(keep_blocks=True, workspace=workspace() if native else None)
    biases: list[Tensor | None] = [torch.full((16,), value) for value in (1.0, 2.0)]
    layer = form(policy, matrices(8, 8), biases=biases)
    for num_rows in (1, FEW_ROWS + 1):
        expected = torch.cat([bias for bias in biases if bias is not None]).expand(num_rows, -1)
        assert torch.equal(layer.forward(torch.zeros(num_rows, 256), None), expected)

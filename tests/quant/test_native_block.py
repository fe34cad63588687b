"""Packed layers against the product with the decoded weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from native_weights import (
    every_type,
    hadamard_rows,
    hadamard_weight,
    library,
    needs_library,
    random_matrix,
    workspace,
)
from paged_sdk.kernels.native.packed import pack_gguf
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.quant.native_block import NativeBlockLinear

pytestmark = needs_library

# Activations in int8 by groups of 16: errors uniform within a step of 1/127 of a group's largest are 0.5 % of the norm.
QUANTIZATION = 0.01
# With a scale for 256 columns beside the weights' own, of random blocks: these have means, which trained weights do
# not, and one large column of 32 after the rotation.
ROTATED_QUANTIZATION = 0.03
COLS = 512

Form = Callable[[list[BlockMatrix], list[Tensor | None]], NativeBlockLinear]


def packed(matrices: list[BlockMatrix], biases: list[Tensor | None]) -> NativeBlockLinear:
    """Multiply any number of rows as few."""
    weights = [pack_gguf(library(), each.blocks, each.tensor_type, *each.shape, num_threads=1) for each in matrices]
    return NativeBlockLinear(workspace(), weights, biases, few_rows=8)


def in_hadamard(matrices: list[BlockMatrix], biases: list[Tensor | None], *, few_rows: int = 0) -> NativeBlockLinear:
    """Multiply more than ``few_rows`` rows by codes of the Hadamard transform."""
    weights = [pack_gguf(library(), each.blocks, each.tensor_type, *each.shape, num_threads=1) for each in matrices]
    return NativeBlockLinear(workspace(), weights, biases, hadamard_for_many=True, few_rows=few_rows)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


@every_type
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_with_the_decoded_weights(tensor_type: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tensor_type)
    matrix = random_matrix(tensor_type, 40, COLS, generator)
    layer = packed([matrix], [None])
    for num_rows in (1, 3, 8, 70):
        x = torch.randn(num_rows, COLS, generator=generator).to(dtype)
        got = layer.forward(x, None)
        assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, (num_rows, 40), True)
        assert relative(got, x.float() @ matrix.decoded().T) < QUANTIZATION


@pytest.mark.parametrize("form", [packed, in_hadamard])
def test_matrices_of_one_input_lie_side_by_side_with_their_biases(form: Form) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [random_matrix(number, rows, COLS, generator) for number, rows in ((12, 33), (14, 7), (2, 20))]
    biases = [torch.randn(33, generator=generator), None, torch.randn(20, generator=generator).bfloat16()]
    layer = form(matrices, biases)
    x = torch.randn(5, COLS, generator=generator)
    expected = torch.cat(
        [
            torch.nn.functional.linear(x, matrix.decoded(), None if bias is None else bias.float())
            for matrix, bias in zip(matrices, biases, strict=True)
        ],
        dim=1,
    )
    assert relative(layer.forward(x, None), expected) < (QUANTIZATION if form is packed else ROTATED_QUANTIZATION)
    assert (layer.in_features, layer.out_features) == (COLS, 60)
    for first, last, matrix, bias in zip((0, 33, 40), (33, 40, 60), matrices, biases, strict=True):
        assert torch.equal(layer.forward(x, None)[:, first:last], form([matrix], [bias]).forward(x, None))


def test_the_number_of_rows_chooses_the_form() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = random_matrix(8, 48, COLS, generator)
    bias = torch.randn(48, generator=generator)
    layer, few, many = (
        in_hadamard([matrix], [bias], few_rows=8),
        packed([matrix], [bias]),
        in_hadamard([matrix], [bias]),
    )
    x = torch.randn(9, COLS, generator=generator)
    assert torch.equal(layer.forward(x[:8], None), few.forward(x[:8], None))
    assert torch.equal(layer.forward(x, None), many.forward(x, None))
    assert not torch.equal(layer.forward(x, None), few.forward(x, None))
    (weight,) = many.native_weights.few
    assert relative(many.forward(x, None) - bias, (hadamard_rows(x) @ hadamard_weight(weight).T).float()) < 1e-3


@pytest.mark.parametrize("form", [packed, in_hadamard])
def test_with_one_form_a_row_does_not_depend_on_its_batch(form: Form) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = form([random_matrix(12, 48, COLS, generator)], [torch.randn(48, generator=generator)])
    x = torch.randn(90, COLS, generator=generator)
    whole = layer.forward(x, None)
    for first, last in ((0, 1), (3, 8), (20, 85)):
        assert torch.equal(layer.forward(x[first:last], None), whole[first:last])


def test_bytes_are_those_of_the_file() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = random_matrix(12, 48, COLS, generator)
    for form in (packed, in_hadamard):
        assert form([matrix], [None]).num_bytes == matrix.blocks.nbytes == 48 * COLS * 9 // 16


def test_the_result_is_the_callers_to_change() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = packed([random_matrix(3, 48, COLS, generator)], [None])
    x = torch.randn(4, COLS, generator=generator)
    first = layer.forward(x, None)
    kept = first.clone()
    first.zero_()
    assert torch.equal(layer.forward(x, None), kept)

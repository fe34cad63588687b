"""Multiply in int8 after a Hadamard transform, by torch alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from native_weights import IQ4_NL, IQ4_XS, TYPES, hadamard_int8, random_matrix
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, BlockMatrix
from paged_sdk.quant.hadamard_int8 import HadamardInt8Linear

# Results in bfloat16 are rounded to it: by 2**-9 at most, 0.0017 in the mean. In float32 there are but few codes that
# lie on a boundary, and fall either way.
SCHEME = 0.003
# Normal weights and activations, each rounded to 1/127 of a row's largest (about 3.2 deviations for 512 of them):
# 0.0073 each, 0.0103 together.
QUANTIZATION = 0.014
COLS = 512

every_decodable_type = pytest.mark.parametrize(
    "tensor_type", [*TYPES, IQ4_XS, IQ4_NL], ids=lambda number: BLOCK_FORMATS[number].name
)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def quantized_product(x: Tensor, matrices: Sequence[BlockMatrix]) -> Tensor:
    """Compute the quantized product without its rounding. -> float64"""
    return hadamard_int8(x) @ torch.cat([hadamard_int8(each.decoded()) for each in matrices]).T


def normal_matrix(quantization: str, rows: int, cols: int) -> BlockMatrix:
    """Draw weights as in trained models."""
    weight = np.random.default_rng(cols).standard_normal((rows, cols), dtype=np.float32)
    kind = gguf.GGMLQuantizationType[quantization]
    return BlockMatrix(kind.value, torch.from_numpy(gguf.quants.quantize(weight, kind)))


@every_decodable_type
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_of_hadamard_int8_rows(tensor_type: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tensor_type)
    matrix = random_matrix(tensor_type, 40, COLS, generator)
    layer = HadamardInt8Linear([matrix], [None])
    for num_rows in (1, 3, 70):
        x = torch.randn(num_rows, COLS, generator=generator).to(dtype)
        got = layer.forward(x, None)
        assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, (num_rows, 40), True)
        assert relative(got, quantized_product(x, [matrix])) < SCHEME


@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("cols", [32, 96, 512, 576])
def test_near_the_product_with_the_decoded_weights(quantization: str, cols: int) -> None:
    matrix = normal_matrix(quantization, 40, cols)
    layer = HadamardInt8Linear([matrix], [None])
    x = torch.randn(70, cols, generator=torch.Generator().manual_seed(cols))
    assert relative(layer.forward(x, None), quantized_product(x, [matrix])) < SCHEME
    assert relative(layer.forward(x, None), x.double() @ matrix.decoded().double().T) < QUANTIZATION


def test_matrices_of_one_input_lie_side_by_side_with_their_biases() -> None:
    """More rows than are decoded at once, of several types."""
    generator = torch.Generator().manual_seed(0)
    matrices = [random_matrix(number, rows, 256, generator) for number, rows in ((12, 1500), (14, 7), (IQ4_XS, 1024))]
    biases: list[Tensor | None] = [10 * torch.randn(rows, generator=generator) for rows in (1500, 7, 1024)]
    layer = HadamardInt8Linear(matrices, biases)
    x = torch.randn(5, 256, generator=generator)
    expected = quantized_product(x, matrices) + torch.cat([bias for bias in biases if bias is not None])
    assert relative(layer.forward(x, None), expected) < SCHEME
    assert (layer.in_features, layer.out_features) == (256, 2531)
    assert layer.num_bytes == 2531 * (256 + 4)


def test_some_matrices_may_have_no_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [random_matrix(8, 20, COLS, generator) for _ in range(3)]
    bias = 10 * torch.randn(20, generator=generator).bfloat16()
    x = torch.randn(5, COLS, generator=generator)
    for place in range(3):
        biases = [bias if index == place else None for index in range(3)]
        layer = HadamardInt8Linear(matrices, biases)
        expected = quantized_product(x, matrices)
        expected[:, 20 * place : 20 * place + 20] += bias.double()
        assert relative(layer.forward(x, None), expected) < SCHEME


def test_channels_that_are_far_larger_than_the_rest_cost_nothing() -> None:
    """What the rotation is for: a few channels of 60 times the rest set a row's scale, and the rest is lost."""
    generator = torch.Generator().manual_seed(0)
    weight = normal_matrix("Q8_0", 64, COLS).decoded()
    x = torch.randn(70, COLS, generator=generator)
    large = torch.tensor([3, 100, 400])
    x[:, large] *= 60
    weight[:, large] = 0  # only what becomes of the rest is seen
    expected = x.double() @ weight.double().T
    layer = HadamardInt8Linear([BlockMatrix(0, weight.view(torch.uint8))], [None])
    scales = x.abs().amax(-1, keepdim=True) / 127
    unrotated = (torch.round(x / scales) * scales).double() @ weight.double().T
    assert relative(layer.forward(x, None), expected) < relative(unrotated, expected) / 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = HadamardInt8Linear([random_matrix(8, 40, COLS, generator)], [None])
    x = torch.randn(5, COLS, generator=generator)
    clean = layer.forward(x, None)
    x[2, 300] = bad
    got = layer.forward(x, None)
    assert got[2].isnan().all()
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(got[others], clean[others])


def test_a_row_of_zeros_gives_the_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(40, generator=generator)
    layer = HadamardInt8Linear([random_matrix(8, 40, COLS, generator)], [bias])
    assert torch.equal(layer.forward(torch.zeros(2, COLS), None), bias.expand(2, -1))


def test_processors_that_add_pairs_of_products_in_16_bits() -> None:
    """As x86 does without VNNI, which oneDNN can be told to do without, where it begins."""
    program = """
import torch
from test_hadamard_int8 import SCHEME, normal_matrix, quantized_product, relative
from paged_sdk.quant.hadamard_int8 import HadamardInt8Linear

matrix = normal_matrix("Q8_0", 40, 512)
x = torch.randn(70, 512, generator=torch.Generator().manual_seed(0))
assert relative(HadamardInt8Linear([matrix], [None]).forward(x, None), quantized_product(x, [matrix])) < SCHEME
"""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path]
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": os.pathsep.join(folders)}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr

"""Repacked layers against the product with the decoded weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from native_weights import IQ3_S, TRITON_TYPES, random_matrix
from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.kernels.quantized.repack import repack
from paged_sdk.quant.dense import DenseLinear
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.policy import NamedMatrix, Role, WeightPolicy

pytest.importorskip("triton")

from paged_sdk.kernels.triton.quantized_linear import quantized_linear
from paged_sdk.kernels.triton.tile_choices import MAX_FEW_ROWS
from paged_sdk.quant.triton_block import TritonBlockLinear

COLS = 256
CUDA = torch.device("cuda")
#: Norm of the difference over the norm of the result, as for the products alone.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 8e-3}


def chosen(stored: list[BlockMatrix], device: torch.device) -> Linear:
    named = [NamedMatrix("linear.weight", matrix) for matrix in stored]
    policy = WeightPolicy(keep_blocks=True)
    return policy.linear(named, [None] * len(stored), Role.LINEAR, dtype=torch.bfloat16, device=device)


def matrices(*tensor_types: int) -> list[BlockMatrix]:
    generator = torch.Generator().manual_seed(0)
    return [random_matrix(number, 3 + i, COLS, generator) for i, number in enumerate(tensor_types)]


@pytest.mark.thinned("dtype", "num_rows", "tensor_types", "with_bias")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("tensor_types", [(8,), (12, 12, 14)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_outputs_lie_side_by_side(
    tensor_types: tuple[int, ...], num_rows: int, dtype: torch.dtype, triton_device: torch.device, *, with_bias: bool
) -> None:
    stored = matrices(*tensor_types)
    generator = torch.Generator().manual_seed(1)
    biases: list[Tensor | None] = [
        torch.randn(len(matrix.blocks), generator=generator).to(dtype) if with_bias else None for matrix in stored
    ]
    biases[0] = None  # beside others that have one
    placed = [None if bias is None else bias.to(triton_device) for bias in biases]
    layer = TritonBlockLinear(stored, placed, device=triton_device)
    x = torch.randn(num_rows, COLS, generator=generator).to(dtype)
    expected = torch.cat(
        [
            x.double() @ matrix.decoded().double().T + (0 if bias is None else bias.double())
            for matrix, bias in zip(stored, biases, strict=True)
        ],
        dim=1,
    )
    got = layer.forward(x.to(triton_device), None)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert (num_rows, layer.in_features, layer.out_features) == (len(x), COLS, got.shape[1])
    assert (got.cpu().double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.thinned("num_rows", "tensor_types", "with_bias")
@pytest.mark.parametrize("num_rows", [0, 1, 4, 5])
@pytest.mark.parametrize("tensor_types", [(12,), (12, 12), (12, 14), (12, 12, 14, 14)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_gate_and_up(
    tensor_types: tuple[int, ...], num_rows: int, triton_device: torch.device, *, with_bias: bool
) -> None:
    """In one launch where they can be; whatever the matrices, the first half of the outputs is the gate."""
    generator = torch.Generator().manual_seed(0)
    stored = [random_matrix(number, 24 // len(tensor_types), COLS, generator) for number in tensor_types]
    biases = [torch.ones(len(each.blocks), device=triton_device) if with_bias else None for each in stored]
    layer = TritonBlockLinear(stored, biases, device=triton_device)
    x = torch.randn(num_rows, COLS, generator=generator) * 0.01  # the interpreter's exp warns of saturated gates
    weight = torch.cat([matrix.decoded() for matrix in stored]).double()
    gate, up = (x.double() @ weight.T + with_bias).chunk(2, dim=1)
    activations: dict[KernelActivation, Tensor] = {"silu": F.silu(gate), "gelu_tanh": F.gelu(gate, approximate="tanh")}
    for activation, activated in activations.items():
        expected = activated * up
        got = layer.forward_gated(x.to(triton_device), activation, None)
        assert got.shape == expected.shape
        assert (got.cpu().double() - expected).norm() <= TOLERANCE[torch.float32] * expected.norm()


def test_few_rows_of_gate_and_up_are_one_launch(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = TritonBlockLinear([random_matrix(12, 4, COLS, torch.Generator())], [None], device=triton_device)
    products: list[int] = []

    def count(x: Tensor, *arguments: Any) -> Tensor:
        products.append(len(x))
        return quantized_linear(x, *arguments)

    monkeypatch.setattr("paged_sdk.quant.triton_block.quantized_linear", count)
    for num_rows in (1, MAX_FEW_ROWS, MAX_FEW_ROWS + 1):
        layer.forward_gated(torch.zeros(num_rows, COLS, device=triton_device), "silu", None)
    assert products == [MAX_FEW_ROWS + 1]


@pytest.mark.parametrize("at_once", [1 << 22, 2 * COLS])
def test_the_weights_as_numbers(at_once: int, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DoRA's adapters ask for them, also of layers whose biases are in halves."""
    monkeypatch.setattr("paged_sdk.quant.triton_block._WEIGHTS_AT_ONCE", at_once)
    stored = matrices(12, 12, 14)
    biases = [torch.arange(3.0, device=triton_device).bfloat16(), None, None]
    layer = TritonBlockLinear(stored, biases, device=triton_device)
    parts = list(layer.decoded(triton_device))
    assert [part.first for part in parts] == ([0, 7] if at_once > COLS * 7 else [0, 2, 4, 6, 7, 9, 11])
    weights = torch.cat([part.weight for part in parts])
    assert torch.equal(weights.cpu(), torch.cat([matrix.decoded() for matrix in stored]))
    expected = torch.tensor([0.0, 1.0, 2.0, *[0.0] * 9], device=triton_device)
    torch.testing.assert_close(torch.cat([part.bias for part in parts]), expected, rtol=0, atol=0)


def test_a_repacked_matrix_is_shared(triton_device: torch.device) -> None:
    matrix = repack(random_matrix(14, 4, COLS, torch.Generator().manual_seed(0))).to(triton_device)
    layer = TritonBlockLinear([matrix], [None], device=triton_device)
    x = torch.randn(1, COLS, device=triton_device)
    before = layer.forward(x, None)
    matrix.supers.zero_()  # type: ignore[union-attr]  # a Q6_K matrix has supers
    assert before.any()
    assert not layer.forward(x, None).any()


def test_bytes_are_about_the_files(triton_device: torch.device) -> None:
    stored = matrices(*TRITON_TYPES)
    layer = TritonBlockLinear(stored, [None] * len(stored), device=triton_device)
    assert layer.num_bytes == pytest.approx(sum(matrix.blocks.nbytes for matrix in stored), rel=0.03)


@pytest.mark.parametrize("tensor_types", [(IQ3_S,), (12, IQ3_S)], ids=str)
def test_other_types_are_decoded_beside_a_gpu(tensor_types: tuple[int, ...]) -> None:
    stored = matrices(*tensor_types)
    layer = chosen(stored, torch.device("meta"))
    assert isinstance(layer, DenseLinear)
    assert layer.weight.shape == (sum(len(matrix.blocks) for matrix in stored), COLS)
    assert layer.weight.dtype is torch.bfloat16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_devices_get_repacked_weights() -> None:
    layer = chosen(matrices(8), CUDA)
    assert isinstance(layer, TritonBlockLinear)
    assert layer.forward(torch.randn(2, COLS, device=CUDA), None).is_cuda

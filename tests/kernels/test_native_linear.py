"""Native linear layers against float64 products of the dequantized weights."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from native_weights import (
    HALVES,
    every_level,
    every_type,
    library,
    needs_library,
    quantize_activations,
    random_blocks,
    random_weight,
    workspace,
)
from paged_sdk.errors import CheckpointError, ConfigError, UnsupportedQuantizationError
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.packed import pack_gguf
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS

pytestmark = needs_library

# The scheme itself: int8 activations in groups of 16, exact integer products, float32 sums.
SCHEME = 2e-6
# Against activations as they are: errors uniform within a step of 1/127 of a group's largest are 0.5 % of the norm.
QUANTIZATION = 0.01


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@every_level
@every_type
def test_linear_is_the_product_of_quantized_activations(isa: str, tensor_type: int) -> None:
    generator = torch.Generator().manual_seed(tensor_type)
    block = BLOCK_FORMATS[tensor_type].elements
    for rows, cols in ((1, block), (16, 2 * block), (75, 512)):
        packed, weight = random_weight(tensor_type, rows, cols, generator)
        linear = NativeLinear(workspace(isa), [packed])
        for num_rows in (1, 2, 3, 5, 8, 17, 33):
            x = torch.randn(num_rows, cols, generator=generator)
            assert relative(linear(x), quantize_activations(x) @ weight.T) < SCHEME
    assert relative(linear(x), x.double() @ weight.T) < QUANTIZATION


@every_level
@every_type
def test_integers_are_exact(isa: str, tensor_type: int) -> None:
    """Activations that are their own int8 codes, unit scales: every product is an integer that float32 holds."""
    generator = torch.Generator().manual_seed(tensor_type)
    form = BLOCK_FORMATS[tensor_type]
    cols = 2 * form.elements
    raw = torch.randint(0, 256, (19, 2, form.num_bytes), generator=generator, dtype=torch.uint8)
    for offset in HALVES[tensor_type]:
        raw[:, :, offset : offset + 2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    raw = raw.flatten(1)
    weight = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(tensor_type)).astype(np.int64)
    x = torch.randint(-2, 3, (5, cols), generator=generator).float()
    x[:, ::16] = 127.0 * torch.tensor([1.0, -1.0])[torch.randint(0, 2, x[:, ::16].shape, generator=generator)]
    expected = x.numpy().astype(np.int64) @ weight.T
    assert np.abs(expected).max() < 2**24
    got = NativeLinear(workspace(isa), [pack_gguf(library(), raw, tensor_type, 19, cols)])(x)
    np.testing.assert_array_equal(got.numpy(), expected.astype(np.float32))


@every_level
@every_type
def test_one_arithmetic_for_every_number_of_rows_and_threads(isa: str, tensor_type: int) -> None:
    generator = torch.Generator().manual_seed(7)
    packed, _ = random_weight(tensor_type, 75, 512, generator)
    x = torch.randn(33, 512, generator=generator)
    norm = torch.rand(512, generator=generator)
    layers = [
        NativeLinear(workspace(isa, num_threads), [packed], norm_weight=norm, norm_eps=1e-5) for num_threads in (1, 2)
    ]
    expected = torch.cat([layers[0](x[row : row + 1]) for row in range(33)])
    for layer in layers:
        for num_rows in (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33):  # every size of tile, and mixtures
            assert torch.equal(layer(x[:num_rows]), expected[:num_rows])


@every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_biases_residual_and_several_weights(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = [(2, 64), (14, 19), (3, 33)]
    packed, weights = zip(*(random_weight(number, rows, 512, generator) for number, rows in sizes), strict=True)
    biases = [torch.randn(64, generator=generator), None, torch.randn(33, generator=generator).bfloat16()]
    norm = 1 + 0.1 * torch.randn(512, generator=generator)
    layer = NativeLinear(workspace(isa, 2), packed, biases=biases, norm_weight=norm, norm_eps=1e-6)
    x = (3 * torch.randn(7, 512, generator=generator)).to(dtype)
    residual = torch.randn(7, 116, generator=generator).to(dtype)
    normed = torch.nn.functional.rms_norm(x.double(), (512,), norm.double(), 1e-6)
    parts = [
        quantize_activations(normed) @ weight.T + (0 if bias is None else bias.double())
        for weight, bias in zip(weights, biases, strict=True)
    ]
    expected = torch.cat(parts, dim=1)
    tolerance = 4e-3 if dtype == torch.bfloat16 else 5e-4
    assert relative(layer(x), expected) < tolerance
    got = layer(x, residual=residual, out=residual)
    assert got is residual
    assert relative(got, expected) > tolerance  # the residual is in it
    fresh = torch.randn(7, 116, generator=generator).to(dtype)
    assert relative(layer(x, residual=fresh), expected + fresh.double()) < tolerance


@every_level
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(isa: str, bad: float) -> None:
    generator = torch.Generator().manual_seed(9)
    packed, _ = random_weight(12, 40, 512, generator)
    x = torch.randn(5, 512, generator=generator)
    norm = torch.ones(512)
    for layer in (NativeLinear(workspace(isa), [packed]), NativeLinear(workspace(isa), [packed], norm_weight=norm)):
        clean = layer(x)
        spoiled = x.clone()
        spoiled[2, 300] = bad
        got = layer(spoiled)
        assert got[2].isnan().all()
        others = torch.tensor([0, 1, 3, 4])
        assert torch.equal(got[others], clean[others])


@every_level
def test_zero_and_tiny_and_huge_activations_and_none(isa: str) -> None:
    generator = torch.Generator().manual_seed(11)
    packed, weight = random_weight(2, 40, 64, generator)
    layer = NativeLinear(workspace(isa), [packed])
    assert torch.equal(layer(torch.zeros(2, 64)), torch.zeros(2, 40))
    assert torch.equal(layer(torch.full((1, 64), 1e-40)), torch.zeros(1, 40))
    assert NativeLinear(workspace(isa), [packed])(torch.zeros(0, 64)).shape == (0, 40)  # no scratch yet
    x = torch.randn(3, 64, generator=generator)
    for factor in (1e-20, 1e30):
        assert relative(layer(x * factor), quantize_activations(x * factor) @ weight.T) < SCHEME


@every_type
def test_packed_weights_keep_the_files_bits(tensor_type: int) -> None:
    generator = torch.Generator().manual_seed(1)
    raw = random_blocks(tensor_type, 32, 512, generator)
    packed = pack_gguf(library(), raw, tensor_type, 32, 512)
    assert packed.num_bytes == raw.numel()
    assert packed.format == BLOCK_FORMATS[tensor_type].name
    assert torch.equal(pack_gguf(library(), raw.flatten(), tensor_type, 32, 512, num_threads=2).data, packed.data)


def test_what_cannot_be_packed_is_refused() -> None:
    generator = torch.Generator().manual_seed(1)
    raw = random_blocks(2, 4, 64, generator)
    with pytest.raises(UnsupportedQuantizationError, match="IQ4_XS weights cannot be packed"):
        pack_gguf(library(), raw, 23, 4, 256)
    with pytest.raises(CheckpointError, match="blocks of 32"):
        pack_gguf(library(), raw, 2, 4, 40)
    with pytest.raises(CheckpointError, match="has 180 bytes: got 144 elements"):
        pack_gguf(library(), raw, 2, 5, 64)
    with pytest.raises(CheckpointError, match="has 144 bytes: got 288 elements"):
        pack_gguf(library(), [raw, raw], 2, 4, 64)
    with pytest.raises(CheckpointError, match="has 1440 bytes: got 288 elements"):
        pack_gguf(library(), [raw] * 10, 2, 40, 64)  # parts of 4 rows, within a panel


def test_parts_are_packed_as_the_whole() -> None:
    raw = random_blocks(12, 70, 512, torch.Generator().manual_seed(1))
    whole = pack_gguf(library(), raw, 12, 70, 512)
    assert torch.equal(pack_gguf(library(), torch.split(raw, 32), 12, 70, 512).data, whole.data)


def test_tensors_that_do_not_fit_are_refused() -> None:
    generator = torch.Generator().manual_seed(1)
    packed, _ = random_weight(2, 32, 64, generator)
    other, _ = random_weight(2, 32, 96, generator)
    layer = NativeLinear(workspace(), [packed])
    x = torch.zeros(3, 64)
    for call in (
        lambda: NativeLinear(workspace(), [packed, other]),
        lambda: NativeLinear(workspace(), []),
        lambda: NativeLinear(workspace(), [packed], biases=[None, None]),
        lambda: NativeLinear(workspace(), [packed], norm_weight=torch.ones(63)),
        lambda: layer(torch.zeros(3, 65)),
        lambda: layer(torch.zeros(64)),
        lambda: layer(x.double()),
        lambda: layer(torch.zeros(64, 3).T),
        lambda: layer(x, residual=torch.zeros(3, 31)),
        lambda: layer(x, out=torch.zeros(3, 32, dtype=torch.bfloat16)),
    ):
        with pytest.raises(ConfigError):
            call()

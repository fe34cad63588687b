"""Quantized weights: squared error beside the gguf package's quantizers, blocks read back by its dequantizers."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from native_weights import every_level, every_type, library, needs_library
from paged_sdk.errors import CheckpointError, ConfigError, UnsupportedQuantizationError
from paged_sdk.kernels.native.quantize import quantize_blocks
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, dequantize

pytestmark = needs_library

#: The gguf package has no quantizers for these: the error of llama.cpp's own (llama-cpp-python 0.3.36), in units of a
#: normal weight's sigma.
LLAMA_CPP_ERROR = {10: 0.29784, 11: 0.15066, 12: 0.07147, 13: 0.03611, 14: 0.01774}


def normal_weight(rows: int, cols: int, *, scale: float = 0.02, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * scale


def error(blocks: Tensor, tensor_type: int, weight: Tensor) -> float:
    return float((dequantize(tensor_type, blocks).double() - weight.double()).square().mean().sqrt())


@every_level
@every_type
def test_no_worse_than_the_reference(isa: str, tensor_type: int) -> None:
    weight = normal_weight(64, 2048)
    blocks = quantize_blocks(library(isa), weight, tensor_type, num_threads=2)
    if tensor_type in LLAMA_CPP_ERROR:
        assert error(blocks, tensor_type, weight) < 0.02 * LLAMA_CPP_ERROR[tensor_type]
    else:
        reference = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType(tensor_type))
        assert error(blocks, tensor_type, weight) < error(torch.from_numpy(reference), tensor_type, weight)


@every_type
@pytest.mark.parametrize("kind", ["heavy tails", "far from zero", "below zero", "small"])
def test_weights_of_other_shapes(kind: str, tensor_type: int) -> None:
    weight = {
        "heavy tails": normal_weight(16, 1024) / normal_weight(16, 1024, seed=1).abs().clamp_min(0.002),
        "far from zero": normal_weight(16, 1024) + 0.1,
        "below zero": -normal_weight(16, 1024).abs(),
        "small": normal_weight(16, 1024, scale=1e-3),
    }[kind]
    got = error(quantize_blocks(library(), weight, tensor_type), tensor_type, weight)
    if tensor_type not in LLAMA_CPP_ERROR:
        reference = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType(tensor_type))
        assert got <= error(torch.from_numpy(reference), tensor_type, weight)
    # A group's step is at most its range over the number of codes, and its error half of that and some rounding.
    levels = {10: 3, 11: 7, 12: 15, 13: 31, 14: 63}.get(tensor_type, 15)
    ranges = weight.reshape(16, -1, 256)
    spread = ranges.amax(-1).clamp_min(0) - ranges.amin(-1).clamp_max(0)
    assert got < float(spread.square().mean().sqrt()) * 1.1 / levels + 2e-8


@every_type
def test_the_gguf_package_reads_the_blocks(tensor_type: int) -> None:
    weight = normal_weight(5, 768)
    blocks = quantize_blocks(library(), weight, tensor_type)
    read = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType(tensor_type))
    assert np.array_equal(read, dequantize(tensor_type, blocks).numpy())


@every_type
def test_threads_dtypes_strides_and_rows_that_end_within_sixteen_groups(tensor_type: int) -> None:
    cols = 3 * BLOCK_FORMATS[tensor_type].elements
    wide = normal_weight(37, cols + 16)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = wide.to(dtype)[:, :cols]
        blocks = quantize_blocks(library(), weight, tensor_type, num_threads=3)
        assert torch.equal(blocks, quantize_blocks(library(), weight.float(), tensor_type, num_threads=1))
        rows = [quantize_blocks(library(), row[None], tensor_type) for row in weight]
        assert torch.equal(blocks, torch.cat(rows))


@every_level
@every_type
def test_constant_rows(isa: str, tensor_type: int) -> None:
    values = torch.tensor([0.0, 1.0, -0.5, 1e-40, -32768.0, 3.0])
    weight = values[:, None].expand(6, 512).contiguous()
    got = dequantize(tensor_type, quantize_blocks(library(isa), weight, tensor_type))
    torch.testing.assert_close(got, weight, rtol=0.01, atol=1e-7)
    assert (got[0] == 0).all()


@every_level
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 4e4])
def test_weights_that_no_scale_fits_are_refused(isa: str, bad: float) -> None:
    weight = normal_weight(20, 512)
    weight[13, 300] = bad
    for tensor_type in (2, 10, 11, 12, 14):
        with pytest.raises(CheckpointError, match="32,768"):
            quantize_blocks(library(isa), weight, tensor_type)


def test_what_does_not_fit_is_refused_and_what_would_is_named() -> None:
    with pytest.raises(
        UnsupportedQuantizationError, match=r"576 columns .* Q4_K: possible are Q4_0, .*, Q8_0$"
    ) as caught:
        quantize_blocks(library(), normal_weight(2, 576), 12)
    assert caught.value.supported == ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
    refused: list[tuple[type[Exception], Callable[[], object]]] = [
        (UnsupportedQuantizationError, lambda: quantize_blocks(library(), normal_weight(2, 512), 20)),
        (UnsupportedQuantizationError, lambda: quantize_blocks(library(), normal_weight(2, 512), 99)),
        (UnsupportedQuantizationError, lambda: quantize_blocks(library(), normal_weight(2, 40), 2)),
        (ConfigError, lambda: quantize_blocks(library(), normal_weight(2, 512).double(), 2)),
        (ConfigError, lambda: quantize_blocks(library(), normal_weight(512, 64).t(), 2)),
        (ConfigError, lambda: quantize_blocks(library(), normal_weight(1, 512)[0], 2)),
        (ConfigError, lambda: quantize_blocks(library(), normal_weight(2, 512), 2, importance=torch.ones(64))),
        (ConfigError, lambda: quantize_blocks(library(), normal_weight(2, 64), 2, importance=torch.ones(64).double())),
        (ConfigError, lambda: quantize_blocks(library(), normal_weight(2, 64), 2, importance=torch.ones(128)[::2])),
    ]
    for expected, call in refused:
        with pytest.raises(expected):
            call()

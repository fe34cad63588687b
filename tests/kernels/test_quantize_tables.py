"""What is quantized by tables means what the gguf package reads, and errs less than llama.cpp's own quantizer."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, dequantize, tensor_type_of
from paged_sdk.kernels.quantized.quantize_tables import TABLE_TYPES, quantize_table_blocks

every_type = pytest.mark.parametrize(
    "tensor_type", sorted(TABLE_TYPES), ids=[BLOCK_FORMATS[number].name for number in sorted(TABLE_TYPES)]
)


def normal(rows: int, cols: int = 512) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)) * 0.02


def weights() -> dict[str, Tensor]:
    return {
        "normal": normal(12),
        "heavy tails": normal(4) / normal(3)[:1].abs().clamp_min(0.002),
        "below zero": -normal(4).abs(),
        "ternary": (normal(4) * 50).round().clamp(-1, 1) * 0.037,
        "bfloat16": normal(4).bfloat16(),
        "nothing": torch.zeros(2, 512),
        "next to nothing": normal(4) * 1e-37,
        "the largest": torch.tensor([-32768.0, 32768.0])[:, None].expand(2, 512).contiguous(),
    }


def error(weight: Tensor, blocks: Tensor, tensor_type: int) -> float:
    return float((dequantize(tensor_type, blocks).double() - weight.double()).square().mean().sqrt())


@every_type
def test_the_gguf_package_reads_the_same(tensor_type: int) -> None:
    for name, weight in weights().items():
        blocks = quantize_table_blocks(weight, tensor_type)
        read = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType(tensor_type))
        assert np.array_equal(read, dequantize(tensor_type, blocks).numpy()), name
        assert np.isfinite(read).all()
        assert error(weight, blocks, tensor_type) <= float(weight.double().square().mean().sqrt()) + 1e-37, name


@pytest.mark.parametrize(
    ("name", "bound"),
    [("IQ4_NL", 0.075), ("IQ4_XS", 0.076), ("MXFP4", 0.115), ("TQ1_0", 0.44), ("TQ2_0", 0.44)],
)
def test_errors_of_normal_weights(name: str, bound: float) -> None:
    weight, number = normal(16, 2048), tensor_type_of(name)
    assert error(weight, quantize_table_blocks(weight, number), number) < bound * 0.02


@every_type
def test_importance_moves_errors_to_where_they_matter_less(tensor_type: int) -> None:
    weight = normal(16)
    importance = torch.randn(512, generator=torch.Generator().manual_seed(1)).mul_(1.5).exp_().clamp_min(1e-3)
    importance /= importance.mean()

    def errors(importance_: Tensor | None) -> tuple[float, float]:
        squares = (dequantize(tensor_type, quantize_table_blocks(weight, tensor_type, importance_)) - weight).square()
        return float((squares * importance).mean()), float(squares.mean())

    (plain, plain_sum), (weighted, weighted_sum) = errors(None), errors(importance)
    # Of MXFP4 one power of two out of three is chosen, and of ternary types what part of a block is zero.
    assert weighted < plain * {20: 0.97, 23: 0.97}.get(tensor_type, 0.998)
    assert plain_sum < weighted_sum
    assert errors(torch.ones(512)) == pytest.approx((plain, plain_sum), rel=1e-3)


def test_what_fits_is_exact() -> None:
    ternary = weights()["ternary"].half().float()
    for name in ("TQ1_0", "TQ2_0"):
        assert error(ternary, quantize_table_blocks(ternary, tensor_type_of(name)), tensor_type_of(name)) == 0
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0]).repeat(2, 16) * 2.0**-7
    assert error(steps, quantize_table_blocks(steps, 39), 39) == 0


@every_type
def test_no_worse_than_llama_cpp(tensor_type: int) -> None:
    found = importlib.util.find_spec("xllamacpp")
    if found is None or found.origin is None:
        pytest.skip("xllamacpp has wheels for Linux on x86-64 alone")
    library = ctypes.CDLL(str(next(Path(found.origin).parent.glob("*.so"))))
    quantize = library.ggml_quantize_chunk
    quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    for name in ("normal", "heavy tails", "below zero", "ternary"):
        weight = weights()[name].contiguous()
        ours = quantize_table_blocks(weight, tensor_type)
        theirs = torch.empty_like(ours)
        quantize(tensor_type, weight.data_ptr(), theirs.data_ptr(), 0, *weight.shape, None)
        assert error(weight, ours, tensor_type) <= error(weight, theirs, tensor_type) * 1.0001, name


@every_type
def test_rows_are_quantized_by_themselves(tensor_type: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(5)
    whole = quantize_table_blocks(weight, tensor_type)
    monkeypatch.setattr("paged_sdk.kernels.quantized.quantize_tables._WEIGHTS_AT_ONCE", 1024)
    assert torch.equal(quantize_table_blocks(weight, tensor_type), whole)


@every_type
def test_blocks_are_on_the_weights_device(tensor_type: int) -> None:
    weight = normal(4)
    whole = quantize_table_blocks(weight, tensor_type)
    with torch.device("meta"):  # an operation that names no device makes its tensor there
        assert torch.equal(quantize_table_blocks(weight, tensor_type), whole)


def test_what_cannot_be_is_refused() -> None:
    for tensor_type, cols in ((12, 512), (20, 48), (23, 96), (99, 512)):
        with pytest.raises(UnsupportedQuantizationError, match=f"{cols} columns cannot be quantized"):
            quantize_table_blocks(normal(2, cols), tensor_type)
    for bad in (torch.nan, torch.inf, 4e4):
        weight = normal(2)
        weight[1, 300] = bad
        with pytest.raises(CheckpointError, match="32,768"):
            quantize_table_blocks(weight, 20)

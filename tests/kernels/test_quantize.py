"""What defines in-situ quantization: the library's own bits, with the gguf package as the judge of their error."""

from __future__ import annotations

from typing import Any, Final

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from native_weights import every_level, every_type, library, needs_library
from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError
from paged_sdk.kernels.native.library import available_levels
from paged_sdk.kernels.native.packed import PACKED_TYPES
from paged_sdk.kernels.native.quantize import quantize_blocks
from paged_sdk.kernels.quantized.gguf_blocks import dequantize
from paged_sdk.kernels.quantized.quantize import QUANTIZED_TYPES, quantize_blocks_reference, weights_at_once

Q6_K: Final = 14
#: The gguf package has no quantizers for these: see ``test_native_quantize.py``.
LLAMA_CPP_ERROR: Final = {10: 0.29784, 11: 0.15066, 12: 0.07147, 13: 0.03611, 14: 0.01774}


def normal(rows: int, cols: int = 512) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)) * 0.02


def weights() -> dict[str, Tensor]:
    constants = torch.tensor([0.0, 1.0, -0.5, 1e-40, -32768.0, 3.0])
    coins = torch.where(normal(5) < 0, -1.0, 1.0)
    return {
        "normal": normal(12),
        "heavy tails": normal(4) / normal(3)[:1].abs().clamp_min(0.002),
        "far from zero": normal(4) + 0.1,
        "below zero": -normal(4).abs(),
        "above zero": normal(4).abs(),
        "below what is normal": normal(4) * 1e-37,
        "sparse": normal(4) * (normal(5)[:4] > 0.03),
        "integers": (normal(4) * 300).round(),
        "of one size": coins[:4],
        "constant": constants[:, None].expand(6, 512).contiguous(),
        "bfloat16": normal(4).bfloat16(),
        "float16": normal(4).half(),
    }


@needs_library
@every_level
@every_type
def test_every_instruction_set_gives_the_same_bits(isa: str, tensor_type: int) -> None:
    for name, weight in weights().items():
        expected = quantize_blocks(library(isa), weight, tensor_type)
        assert torch.equal(quantize_blocks_reference(weight, tensor_type), expected), name


@needs_library
@every_type
def test_every_instruction_set_weighs_errors_alike(tensor_type: int) -> None:
    weights_of_squares = torch.where(normal(7)[0] > 0.02, 1e-3, importance(512))  # some columns are hardly used
    for name, weight in weights().items():
        expected = quantize_blocks_reference(weight, tensor_type, weights_of_squares)
        for isa in available_levels():
            got = quantize_blocks(library(isa), weight, tensor_type, importance=weights_of_squares, num_threads=2)
            assert torch.equal(expected, got), (name, isa)
    assert not torch.equal(got, quantize_blocks(library(), weight, tensor_type))


@every_type
def test_no_worse_than_other_quantizers(tensor_type: int) -> None:
    weight = normal(16, 2048)

    def error(blocks: Tensor) -> float:
        return float((dequantize(tensor_type, blocks).double() - weight.double()).square().mean().sqrt())

    blocks = quantize_blocks_reference(weight, tensor_type)
    if tensor_type in LLAMA_CPP_ERROR:
        assert error(blocks) < 0.02 * LLAMA_CPP_ERROR[tensor_type]
    else:
        theirs = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType(tensor_type))
        assert error(blocks) < error(torch.from_numpy(theirs))
    read = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType(tensor_type))
    assert np.array_equal(read, dequantize(tensor_type, blocks).numpy())


@every_type
def test_rows_are_quantized_by_themselves(tensor_type: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(5)
    whole = quantize_blocks_reference(weight, tensor_type)
    monkeypatch.setattr("paged_sdk.kernels.quantized.quantize._WEIGHTS_AT_ONCE", 1024)
    assert torch.equal(quantize_blocks_reference(weight, tensor_type), whole)


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations, and how often one is waited for to learn whether all weights are in range."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.waits += func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool
        return func(*args, **kwargs or {})


def test_a_device_gets_many_weights_with_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the bits of pieces that suit the CPU."""
    few, many = normal(4), normal(1024)
    with Calls() as for_few:
        quantize_blocks_reference(few, Q6_K)
    with Calls() as on_cpu:
        expected = quantize_blocks_reference(many, Q6_K)
    at_once = weights_at_once(torch.device("cuda"), on_cpu=1 << 17)
    assert at_once >= 1 << 24
    monkeypatch.setattr("paged_sdk.kernels.quantized.quantize._WEIGHTS_AT_ONCE", at_once)
    with Calls() as on_device:
        found = quantize_blocks_reference(many, Q6_K)
    assert torch.equal(found, expected)
    assert (on_device.count, on_device.waits) == (for_few.count, 1)
    assert on_cpu.waits == 4
    assert on_cpu.count > 3 * on_device.count


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 4e4])
def test_weights_that_no_scale_fits_are_refused(bad: float) -> None:
    weight = normal(4)
    weight[2, 300] = bad
    for tensor_type in (2, 10, 11, 12, 14):
        with pytest.raises(CheckpointError, match="32,768"):
            quantize_blocks_reference(weight, tensor_type)


def test_types_that_cannot_be_written_are_refused() -> None:
    for tensor_type, cols in ((20, 512), (99, 512), (12, 96), (2, 40)):
        with pytest.raises(UnsupportedQuantizationError, match=f"{cols} columns cannot be quantized"):
            quantize_blocks_reference(normal(2, cols), tensor_type)


def test_what_can_be_quantized_can_be_packed() -> None:
    assert QUANTIZED_TYPES == PACKED_TYPES


def importance(cols: int) -> Tensor:
    """Return much of a few columns, as there is after an activation function."""
    values = torch.randn(cols, generator=torch.Generator().manual_seed(cols)).mul_(1.5).exp_()
    return values / values.mean()


@pytest.mark.parametrize("tensor_type", sorted(QUANTIZED_TYPES))
def test_importance_moves_errors_to_where_they_matter_less(tensor_type: int) -> None:
    weight, weights = normal(12), importance(512)

    def errors(importance: Tensor | None) -> tuple[float, float]:
        read = dequantize(tensor_type, quantize_blocks_reference(weight, tensor_type, importance))
        squares = (read - weight).square()
        return float((squares * weights).mean()), float(squares.mean())

    (plain, plain_sum), (weighted, weighted_sum) = errors(None), errors(weights)
    # The more bits there are, the less is left to gain: the scale that is best for all is near that for some.
    assert weighted < plain * (0.9995 if tensor_type in (8, 14) else 0.97)
    assert plain_sum < weighted_sum
    assert errors(torch.ones(512)) == pytest.approx((plain, plain_sum), rel=0.01)


@pytest.mark.parametrize("tensor_type", sorted(QUANTIZED_TYPES))
def test_importance_of_rows_that_are_all_the_same(tensor_type: int) -> None:
    values = torch.tensor([0.0, 0.3, -0.7, 1e-40, 3.0])
    weight = values[:, None].expand(5, 512)
    read = dequantize(tensor_type, quantize_blocks_reference(weight, tensor_type, importance(512).clamp_min(1e-3)))
    torch.testing.assert_close(read, weight, rtol=0.01, atol=1e-7)

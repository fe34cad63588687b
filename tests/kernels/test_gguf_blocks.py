"""Every block format equals the gguf package's own decoder, bit for bit."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paged_sdk.errors import UnsupportedQuantizationError
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, block_format, dequantize

# The gguf package decodes these; F64 is what it is, and of Q1_0 it knows the size alone.
TYPES: Any = gguf.GGMLQuantizationType
DECODABLE = [number for number in BLOCK_FORMATS if number not in (TYPES.F64, TYPES.Q1_0)]
QUANTIZED = [number for number, form in BLOCK_FORMATS.items() if form.elements > 1]


def random_blocks(number: int, rows: int, blocks: int) -> torch.Tensor:
    size = BLOCK_FORMATS[number].num_bytes * blocks
    return torch.from_numpy(np.random.default_rng(number).integers(0, 256, (rows, size), dtype=np.uint8))


def reference(number: int, data: torch.Tensor) -> torch.Tensor:
    if number == TYPES.Q1_0:
        blocks = data.numpy().reshape(-1, 18)
        signs = np.where(np.unpackbits(blocks[:, 2:], axis=1, bitorder="little") == 1, 1, -1).astype(np.float32)
        values = signs * blocks[:, :2].copy().view(np.float16).astype(np.float32)
        return torch.from_numpy(values.reshape(len(data), -1))
    with np.errstate(all="ignore"):  # random scales include NaN and Inf
        return torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType(number)))


@pytest.mark.parametrize("number", BLOCK_FORMATS, ids=lambda number: BLOCK_FORMATS[number].name)
def test_sizes_are_ggmls(number: int) -> None:
    form = block_format(number)
    known = gguf.GGMLQuantizationType(number)
    assert (form.name, (form.elements, form.num_bytes)) == (known.name, gguf.GGML_QUANT_SIZES[known])


@pytest.mark.parametrize("number", DECODABLE, ids=lambda number: BLOCK_FORMATS[number].name)
def test_decodes_as_ggml_does(number: int) -> None:
    data = random_blocks(number, rows=37, blocks=3)
    one = data[:1, : BLOCK_FORMATS[number].num_bytes]
    torch.testing.assert_close(dequantize(number, one), reference(number, one), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(dequantize(number, data), reference(number, data), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("number", QUANTIZED, ids=lambda number: BLOCK_FORMATS[number].name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_rounded_from_float32(number: int, dtype: torch.dtype) -> None:
    data = random_blocks(number, rows=2, blocks=3)
    got = dequantize(number, data, dtype=dtype)
    torch.testing.assert_close(got, reference(number, data).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_tensors_longer_than_a_chunk(name: str) -> None:
    number = gguf.GGMLQuantizationType[name]
    form = BLOCK_FORMATS[number]
    data = random_blocks(number, rows=3, blocks=(1 << 20) // form.elements - 1)
    torch.testing.assert_close(dequantize(number, data), reference(number, data), rtol=0, atol=0, equal_nan=True)


def test_leading_dimensions_stay() -> None:
    data = torch.zeros(2, 5, 2 * 18, dtype=torch.uint8)
    assert dequantize(gguf.GGMLQuantizationType.Q4_0, data).shape == (2, 5, 64)
    assert dequantize(gguf.GGMLQuantizationType.Q4_0, data[0, 0]).shape == (64,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_plain_floats_are_shared_in_their_own_dtype(dtype: torch.dtype) -> None:
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    number = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}[
        str(dtype).removeprefix("torch.")
    ]
    got = dequantize(gguf.GGMLQuantizationType[number], values.view(torch.uint8), dtype=dtype)
    assert torch.equal(got, values)
    assert got.data_ptr() == values.data_ptr()


def test_every_type_that_the_package_decodes_is_decoded() -> None:
    known = {kind.value for kind in gguf.quants._type_traits}
    assert known <= BLOCK_FORMATS.keys()
    assert len(known) > 20


def test_every_entry_of_every_codebook_is_decoded() -> None:
    for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"):
        data = random_blocks(TYPES[name], rows=4, blocks=250)  # 32,000 entries or more of at most 2,048
        expected = reference(TYPES[name], data)
        torch.testing.assert_close(dequantize(TYPES[name], data), expected, rtol=0, atol=0, equal_nan=True)


def test_unknown_type_says_what_is_known() -> None:
    with pytest.raises(UnsupportedQuantizationError, match=r"type 15 .*Q4_K") as caught:
        block_format(TYPES.Q8_K)
    assert caught.value.quantization == "15"
    assert set(caught.value.supported) == {form.name for form in BLOCK_FORMATS.values()}

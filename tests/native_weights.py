"""Make random GGUF blocks with sane scales, and list the native levels to test, for all tests of packed weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paged_sdk.kernels.native.library import NativeLibrary, Workspace, available_levels, load, why_not
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.packed import PACKED_TYPES, PackedWeight, pack_gguf
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, BlockMatrix, dequantize
from paged_sdk.kernels.quantized.triton_blocks import TRITON_BLOCK_FORMATS

TYPES = sorted(PACKED_TYPES)
TRITON_TYPES = sorted(TRITON_BLOCK_FORMATS)
IQ4_NL, IQ4_XS = 20, 23
"""Types whose codes name entries of a table."""
IQ3_S = 21
"""A type that can be decoded, but not packed."""

#: Where in a block the float16 scale (and minimum) lie.
HALVES = {
    2: (0,), 3: (0, 2), 6: (0,), 7: (0, 2), 8: (0,), 10: (80, 82), 11: (108,), 12: (0, 2), 13: (0, 2), 14: (208,),
    IQ4_NL: (0,), IQ4_XS: (0,), IQ3_S: (0,),
}  # fmt: skip

needs_library = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
every_level = pytest.mark.parametrize("isa", available_levels())
every_type = pytest.mark.parametrize("tensor_type", TYPES, ids=lambda number: BLOCK_FORMATS[number].name)
every_triton_type = pytest.mark.parametrize("tensor_type", TRITON_TYPES, ids=lambda number: BLOCK_FORMATS[number].name)


def random_blocks(tensor_type: int, rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Make uniform weights of every code, with scales of either sign and of the size that real files have."""
    form = BLOCK_FORMATS[tensor_type]
    shape = (rows, cols // form.elements, form.num_bytes)
    raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    for offset in HALVES[tensor_type]:
        scale = torch.randn(*shape[:2], 1, generator=generator) * 0.01
        raw[:, :, offset : offset + 2] = scale.half().view(torch.uint8)
    return raw.flatten(1)


def random_matrix(tensor_type: int, rows: int, cols: int, generator: torch.Generator) -> BlockMatrix:
    """Make random blocks in the form in which a checkpoint returns them."""
    return BlockMatrix(tensor_type, random_blocks(tensor_type, rows, cols, generator))


def library(isa: str | None = None) -> NativeLibrary:
    loaded = load(isa)
    assert loaded is not None
    return loaded


def workspace(isa: str | None = None, num_threads: int = 1) -> Workspace:
    return Workspace(library(isa), num_threads=num_threads)


def random_weight(tensor_type: int, rows: int, cols: int, generator: torch.Generator) -> tuple[PackedWeight, Tensor]:
    """Make a packed weight and its value in float64 [rows, cols]."""
    raw = random_blocks(tensor_type, rows, cols, generator)
    packed = pack_gguf(library(), raw, tensor_type, rows, cols, num_threads=1)
    return packed, dequantize(tensor_type, raw).double()


def quantize_activations(x: Tensor) -> Tensor:
    """Return activations as the kernels quantize them: int8 in groups of 16, the largest of a group at 127. ->
    float64
    """
    groups = x.float().reshape(len(x), -1, 16)
    largest = groups.abs().amax(-1, keepdim=True)
    # A tensor over a tensor: torch makes a number over a tensor a product with the reciprocal, which rounds twice.
    inverse = torch.where(largest < 1e-30, 0.0, torch.full_like(largest, 127.0) / largest)
    return ((groups * inverse).round().double() * (largest / 127.0).double()).reshape(x.shape)


def hadamard(size: int) -> Tensor:
    """Return Sylvester's matrix, orthonormal: entry (i, j) is negative where i and j have an odd number of bits in
    common.

    -> float64
    """
    signs = [[1 - 2 * ((i & j).bit_count() & 1) for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64).div(size**0.5)


def transform(rows: Tensor) -> Tensor:
    """Multiply rows by Hadamard matrices over the largest blocks of up to 256 columns that divide them. -> float64"""
    block = math.gcd(rows.shape[-1], 256)
    transformed: Tensor = torch.unflatten(rows.double(), -1, (-1, block)) @ hadamard(block)
    return transformed.flatten(-2)


SCALE_COLUMNS = 256
"""So many columns share a scale where the native kernels multiply many rows."""

UNIT_ROUNDOFF = 2.0**-24
"""The largest relative error of one rounding to float32."""


def hadamard_scales(rows: Tensor, roundings: float) -> tuple[Tensor, Tensor]:
    """Return the scales of int8 rows after the Hadamard transform, and by how much float32 may miss them. -> float64
    [num_rows] each

    In a block of n columns, an element of the transform is the sum of n terms of either sign, over sqrt(n). If each
    term is rounded ``roundings`` times on its way into the sum, the sum is off by at most ``roundings`` times
    2**-24 times the sum of the terms' magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 4.2), and
    so is the largest of a row. The other errors are relative: the square root, its reciprocal and the product with it,
    and the division by 127.
    """
    block = math.gcd(rows.shape[-1], 256)
    largest = transform(rows).abs().amax(-1)
    sums = torch.unflatten(rows.double().abs(), -1, (-1, block)).sum(-1).amax(-1) / block**0.5
    usable = largest.isfinite()  # NaN or Inf anywhere in a row
    scales = torch.where(usable, largest / 127, torch.nan)
    return scales, torch.where(usable, (roundings * sums + 4 * largest) / 127 * UNIT_ROUNDOFF, 0.0)


def check_scales(scales: Tensor, rows: Tensor, roundings: float) -> None:
    """Check scales [num_rows] of int8 rows after the Hadamard transform, NaN where a row is not finite."""
    expected, bound = hadamard_scales(rows, roundings)
    assert torch.equal(scales.isnan(), expected.isnan())
    assert ((scales.double() - expected).abs() <= bound)[~expected.isnan()].all()


def hadamard_int8(rows: Tensor) -> Tensor:
    """Return rows as products with Hadamard-transformed weights quantize them: 127 codes on either side, still
    transformed. -> float64
    """
    transformed = transform(rows)
    scale = (transformed.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-300)
    return torch.round(transformed / scale) * scale


def transform_groups(rows: Tensor) -> Tensor:
    """Multiply rows by Hadamard matrices over each 32 columns, as the native kernels do. -> float64"""
    transformed: Tensor = torch.unflatten(rows.double(), -1, (-1, 32)) @ hadamard(32)
    return transformed.flatten(-2)


def code_scales(transformed: Tensor) -> Tensor:
    """Return the scale of each number of transformed rows as int8: a 127th of the largest of 256 columns."""
    largest = [
        part.abs().amax(-1, keepdim=True).expand_as(part) for part in torch.split(transformed, SCALE_COLUMNS, dim=-1)
    ]
    return torch.cat(largest, -1) / 127


def hadamard_rows(rows: Tensor) -> Tensor:
    """Return many activations as the native kernels quantize them, still transformed. -> float64"""
    transformed = transform_groups(rows)
    scales = code_scales(transformed).clamp_min(1e-300)
    return torch.round(transformed / scales) * scales


def hadamard_weight(weight: PackedWeight, isa: str | None = None) -> Tensor:
    """Return packed weights as the native kernels multiply them with many rows, still transformed: products with rows
    of which one code alone is not zero. -> float64 [rows, cols]
    """
    one_code = (transform_groups(torch.eye(weight.cols)) * 32**0.5).float()
    products = NativeLinear(workspace(isa), [weight.hadamard_form()])(one_code)
    return products.double().T / math.sqrt(32)

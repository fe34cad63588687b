"""Converts grouped matrices to GGUF blocks of 32, which the GPU kernels multiply.

Codes are unchanged: up to 4 bits in Q4_1 blocks, 5 bits in Q5_1, int8 in Q8_0. Scales and minima are rounded to float16
and repeated for every 32 columns, so 4-bit codes in groups of 128 take 5 bits per weight instead of 4.25. Tables of 16
levels become int8, in Q8_0 blocks.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix, tensor_type_of
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix, even_levels, rounded_levels

__all__ = ["as_blocks"]

_WIDTH: Final = 32  # weights of a block
# Allowed rounding errors: relative to the number itself, four times that of normal float16 numbers; or relative to the
# largest of the row, for numbers that are subnormal in float16.
_ROUNDING: Final = 2.0**-9
_OF_LARGEST: Final = 2.0**-12


def as_blocks(matrix: GroupedMatrix) -> BlockMatrix | None:
    """Return a matrix in blocks on its own device, or None if no block type fits.

    Columns must be in the input's order and a multiple of 32, groups must consist of whole blocks, codes must be as
    above, and float16 must be able to hold scales and minima.
    """
    cols = matrix.shape[1]
    if matrix.order is not None or not cols or cols % _WIDTH or min(matrix.group_size, cols) % _WIDTH:
        return None
    bits, scales, minima = matrix.bits, matrix.scales, matrix.minima
    codes = matrix.codes & ((1 << bits) - 1)
    if matrix.levels is not None:
        if (line := even_levels(matrix.levels)) is not None:
            start, step = line
            minima = start * scales if minima is None else minima + start * scales
            scales = scales * step
        elif bits <= 4 and minima is None:
            levels, factor = rounded_levels(matrix.levels)
            codes, scales, bits = levels[codes.int()], scales / factor, 8
            minima = -128 * scales
        else:
            return None
    if bits > 5:
        if minima is None or not torch.equal(minima, -128 * scales):
            return None
        return _blocks("Q8_0", matrix, [scales], codes.to(torch.int16).sub_(128).to(torch.int8).view(torch.uint8))
    numbers = [scales, torch.zeros_like(scales) if minima is None else minima]
    return _blocks("Q4_1" if bits <= 4 else "Q5_1", matrix, numbers, codes)


def _blocks(name: str, matrix: GroupedMatrix, numbers: list[Tensor], codes: Tensor) -> BlockMatrix | None:
    """Write blocks of group numbers (scales, minima) and codes; return None if float16 cannot hold the numbers."""
    halves = [each.half() for each in numbers]
    if not all(_near(half.float(), each) for half, each in zip(halves, numbers, strict=True)):
        return None
    rows, cols = matrix.shape
    of_blocks = torch.arange(cols // _WIDTH, device=codes.device) * _WIDTH // matrix.group_size
    parts = [half[:, of_blocks].reshape(-1, 1).view(torch.uint8) for half in halves]
    weights = codes.reshape(-1, _WIDTH)
    if name == "Q5_1":
        shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
        parts.append((((weights >> 4) & 1).view(-1, 4, 8) << shifts).sum(2, dtype=torch.uint8))
    if name != "Q8_0":
        weights = (weights[:, :16] & 15) | (weights[:, 16:] << 4)
    return BlockMatrix(tensor_type_of(name), torch.cat((*parts, weights), dim=1).view(rows, -1))


def _near(rounded: Tensor, numbers: Tensor) -> bool:
    sizes = numbers.abs()
    allowed = torch.maximum(_ROUNDING * sizes, _OF_LARGEST * sizes.amax(1, keepdim=True))
    return bool(((rounded - numbers).abs() <= allowed).all())

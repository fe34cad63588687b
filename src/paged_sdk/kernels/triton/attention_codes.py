"""Reads f8e4m3 codes for float16 products, two neighboring elements of a head at a time.

Matrix instructions take values in pairs of neighboring keys, and no load transposes bytes; moving bytes one by one
would take more instructions than everything else. So a cache is read as 16-bit integers, each with an even and an odd
element of a head, which are loaded and transposed like any 16-bit type. Even and odd elements stay in separate tiles
until the end of a kernel.

float16 represents all f8e4m3 values, and decoding to it takes the fewest instructions: for four codes, three with
hardware conversion (compute capability 8.9), else six. bfloat16 would take one more conversion per code.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Decoder", "as_pairs", "fit_query", "split_codes"]


class Decoder(IntEnum):
    """Names the ways in which a kernel decodes f8e4m3."""

    PLAIN = 0
    """To float32, by operations that Triton's interpreter supports."""

    INTEGER = 1
    """To float16, by integer instructions."""

    HARDWARE = 2
    """To float16, by the conversion instruction of compute capability 8.9 and newer."""


# A register holds two 16-bit integers, four codes: bytes 0 and 2 are even elements.
CONVERT: Final = """{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}"""
# Shifted left by 7 bits, an f8e4m3 code's exponent and mantissa are those of a float16 with 1/256 of its value,
# subnormals included. Each byte is sign-extended to 16 bits and shifted; the mask clears the exponent bit that the sign
# extension has set.
SHIFT: Final = """{
    .reg .b32 even, odd;
    prmt.b32 even, $2, 0, 0xA280;
    prmt.b32 odd, $2, 0, 0xB391;
    shl.b32 even, even, 7;
    shl.b32 odd, odd, 7;
    and.b32 $0, even, 0xBF80BF80;
    and.b32 $1, odd, 0xBF80BF80;
}"""
_CONVERT: tl.constexpr = tl.constexpr(CONVERT)
_SHIFT: tl.constexpr = tl.constexpr(SHIFT)
_PLAIN: tl.constexpr = tl.constexpr(int(Decoder.PLAIN))
_HARDWARE: tl.constexpr = tl.constexpr(int(Decoder.HARDWARE))
_INTEGER: tl.constexpr = tl.constexpr(int(Decoder.INTEGER))
_EXPONENT: tl.constexpr = tl.constexpr(0x7F800000)


def as_pairs(cache: Tensor) -> Tensor:
    """View an f8e4m3 cache as 16-bit integers, each with two neighboring elements of a head."""
    return cache.view(torch.int16)


@triton.jit
def split_codes(pairs: tl.tensor, decoder: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Decode pairs of codes to even and odd elements.

    :param pairs: int16, of any shape
    :returns: even and odd elements, float16, or float32 with the plain decoder. The integer decoder returns 2**-8 times
        the values
    """
    if decoder == _HARDWARE:
        even, odd = tl.inline_asm_elementwise(_CONVERT, "=r,=r,r", [pairs], (tl.float16, tl.float16), True, 2)
    elif decoder == _INTEGER:
        even, odd = tl.inline_asm_elementwise(_SHIFT, "=r,=r,r", [pairs], (tl.float16, tl.float16), True, 2)
    else:
        even = (((pairs << 8) >> 1) & ~0x4000).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        odd = ((pairs >> 1) & ~0x407F).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return even, odd


@triton.jit
def fit_query(rows: tl.tuple, decoder: tl.constexpr) -> tuple[tl.tuple, tl.tensor]:
    """Convert query rows to the dtype of decoded keys, each divided by a power of two to fit float16's range.

    :param rows: ``[block_m, ...]`` each: the elements of every row in several tiles
    :returns: likewise, and what each row was divided by, ``[block_m]`` float32
    """
    peak = tl.max(tl.abs(rows[0].to(tl.float32)), 1)
    for i in tl.static_range(1, len(rows)):
        peak = tl.maximum(peak, tl.max(tl.abs(rows[i].to(tl.float32)), 1))
    factor = (peak.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    factor = tl.where(factor == 0.0, 1.0, factor)
    inverse = tl.math.div_rn(tl.full(factor.shape, 1.0, tl.float32), factor)
    fitting: tl.tuple = ()
    for i in tl.static_range(len(rows)):
        row = rows[i].to(tl.float32) * inverse[:, None]
        fitting += ((row if decoder == _PLAIN else row.to(tl.float16)),)
    return fitting, factor

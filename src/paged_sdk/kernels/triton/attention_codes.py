"""Reads f8e4m3 codes for products in float16, two neighboring elements of a head at a time.

Matrix instructions take values in pairs of neighboring keys, and no load transposes bytes: moved one by one, they would
take more instructions than all else. So a cache is read as integers of 16 bits, which hold an even and an odd element
of a head, loaded and transposed like any other 16 bits. What belongs to even elements and what belongs to odd ones
stays apart, in two tiles, up to the end of a kernel.

float16 has all of f8e4m3's values, and takes the fewest instructions: of each four codes, three where the hardware
converts (compute capability 8.9), else six. On the way to bfloat16 each would take a conversion of its own besides.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Decoder", "as_pairs", "load_query_pairs", "split_codes"]


class Decoder(IntEnum):
    """Names how codes become numbers in a compiled kernel."""

    PLAIN = 0
    """By operations that Triton's interpreter knows too, for products in float32."""

    INTEGER = 1
    """By integer instructions, to float16."""

    HARDWARE = 2
    """By the conversion that compute capability 8.9 and newer have, to float16."""


# A register holds two integers of 16 bits, so bytes 0 to 3 of four elements: 0 and 2 are the even ones.
CONVERT: Final = """{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}"""
# An f8e4m3 value, subnormals included, is 256 times the float16 with its sign, exponent and mantissa bits in the same
# places. Each byte is extended by its sign to 16 bits, shifted up, and the extension taken off the exponent.
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
    """View an f8e4m3 cache as integers, each of two neighboring elements of a head."""
    return cache.view(torch.int16)


@triton.jit
def split_codes(pairs: tl.tensor, decoder: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Decode the even and the odd elements that are stored in pairs.

    :param pairs: int16, of any shape
    :returns: both float16, or both float32 by the plain decoder. The integer decoder returns 2**-8 times the values.
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
def load_query_pairs(
    pointers: tl.tensor, mask: tl.tensor, decoder: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Load the even and the odd elements of rows of queries, as the decoded keys want them.

    :param pointers: ``[block_m, elements / 2]``, to the even elements
    :param mask: likewise, of the even elements; an odd one is there with its even neighbor
    :returns: even and odd elements ``[block_m, elements / 2]``, and what each row has been divided by, ``[block_m]``
        float32, a power of two: float16 has not the range of bfloat16
    """
    even = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(pointers + 1, mask=mask, other=0.0).to(tl.float32)
    peak = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
    factor = (peak.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    factor = tl.where(factor == 0.0, 1.0, factor)
    inverse = tl.math.div_rn(tl.full(factor.shape, 1.0, tl.float32), factor)
    even *= inverse[:, None]
    odd *= inverse[:, None]
    if decoder != _PLAIN:
        even = even.to(tl.float16)
        odd = odd.to(tl.float16)
    return even, odd, factor

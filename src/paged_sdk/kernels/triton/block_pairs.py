"""Decodes :mod:`paged_sdk.kernels.quantized.triton_blocks` matrices to 16-bit floats, two weights per instruction.

An instruction on a pair of 16-bit floats ("halves": float16 or bfloat16) takes as long as one on a float32 number, and
matrix instructions take halves in pairs. So the same field of two words is moved into the mantissas of two halves:
combined with the bits of 128 in bfloat16, or 1024 in float16, it forms that number plus the field, exactly. One
instruction subtracts that number and the field's offset, and one multiplies by the scale and subtracts the minimum;
intermediate results are exact. A 4-bit weight takes 2.2 instructions, instead of 3.5 with float32.

Scales and minima are rounded to the weights' dtype first, which changes a weight by less than its own rounding does.

Triton's interpreter does not support inline assembly: there, :func:`~paged_sdk.kernels.triton.blocks.decode_tile`
decodes, and a test executes the assembly written here.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode_fields", "fields_assembly", "scales_assembly"]


@triton.constexpr_function
def _twice(half: int) -> int:
    return half * 0x10001


@triton.constexpr_function
def fields_assembly(half: int, bits: int, offset: int, has_minima: bool, is_bfloat16: bool) -> tuple[str, str]:
    """Return PTX that decodes all fields in one half of two words, and its operand constraints.

    Operands are the decoded fields, as pairs of halves; then the two words, their high bits for 5 and 6 bits (a pair of
    16-bit integers), the scale (a pair of halves) and, if there is one, the negative minimum (likewise).

    :param half: 0 for the lower half of the words, 1 for the upper half
    """
    fields = 2 if bits == 8 else 4
    base, one = (0x4300, 0x3F80) if is_bfloat16 else (0x6400, 0x3C00)
    kind = "bf16x2" if is_bfloat16 else "f16x2"
    seven = bits == 8 and is_bfloat16
    has_high = bits in (5, 6)
    scale = fields + 2 + has_high
    lines = [
        ".reg .b32 words, moved, top, one, base, none;",
        f"mov.b32 one, {_twice(one | 0x8000 if seven else one):#x};",
        f"mov.b32 base, {_twice((base | 0x8000) + offset):#x};",
        f"mov.b32 none, {_twice(0x8000):#x};",
        f"prmt.b32 words, ${fields}, ${fields + 1}, {0x7632 if half else 0x5410:#x};",
    ]
    for i in range(fields):
        field, out = half * fields + i, f"${i}"
        place = 32 // (2 * fields) * i
        source = "moved" if place else "words"
        if place:
            lines.append(f"shr.u32 moved, words, {place};")
        if seven:
            # bfloat16's mantissa has seven bits: out is 128 plus the lower seven. Subtracting 256 if the eighth bit is
            # clear, and 128 if it is set, gives the field minus its offset of 128.
            lines.append(f"lop3.b32 {out}, {source}, 0x7F007F, {_twice(base):#x}, 0xEA;")
            lines.append(f"lop3.b32 top, {source}, 0x800080, {_twice(base):#x}, 0xAE;")
            lines.append(f"fma.rn.{kind} {out}, top, one, {out};")
        else:
            mask = 0xFF if bits == 8 else 0xF
            lines.append(f"lop3.b32 {out}, {source}, {_twice(mask):#x}, {_twice(base):#x}, 0xEA;")
            if has_high:
                lines += _high_bits(out, field, bits, f"${fields + 2}")
            lines.append(f"fma.rn.{kind} {out}, {out}, one, base;")
        lines.append(f"fma.rn.{kind} {out}, {out}, ${scale}, {f'${scale + 1}' if has_minima else 'none'};")
    operands = ["=&r"] * fields + ["r"] * (3 + has_high + has_minima)
    return "{\n" + "\n".join(lines) + "\n}", ",".join(operands)


@triton.constexpr_function
def _high_bits(out: str, field: int, bits: int, high: str) -> list[str]:
    """Return PTX that inserts a field's high bits at bit 4, above its lowest four."""
    pair, odd = field // 2, field % 2
    place = 4 * odd + (pair if bits == 5 else 2 * pair + 4 * (pair // 2))
    mask = _twice(0x10 if bits == 5 else 0x30)
    lines = []
    source = high
    if place != 4:
        source = "moved"
        shift = f"shl.b32 moved, {high}, {4 - place};" if place < 4 else f"shr.u32 moved, {high}, {place - 4};"
        lines.append(shift)
    return [*lines, f"lop3.b32 {out}, {source}, {mask:#x}, {out}, 0xEA;"]


@triton.constexpr_function
def scales_assembly(has_minima: bool, has_supers: bool, is_bfloat16: bool) -> tuple[str, str]:
    """Return PTX that computes the scales of a chunk, multiplied by supers, and its operand constraints.

    Operands are halves: two scales, or four if groups have 16 weights, and two negative minima if there are any; then
    the word of scales and, if there are any, that of minima, or the supers.
    """
    wide = has_supers and not has_minima
    halves = 4 if has_minima or wide else 2
    word, other = f"${halves}", f"${halves + 1}"
    lines = [
        ".reg .b32 numbers, factor, signs, one, minus_one, base, minus_base;",
        ".reg .b16 low, high;",
        ".reg .f32 low_number, high_number;",
        f"mov.b32 one, {_twice(0x3C00):#x};",
        f"mov.b32 minus_one, {_twice(0xBC00):#x};",
        f"mov.b32 base, {_twice(0x6400):#x};",
        f"mov.b32 minus_base, {_twice(0xE480 if wide else 0xE400):#x};",
    ]
    if has_supers:
        # A byte below the exponent of 1024 forms 1024 plus the byte; signed bytes are biased by 128 first.
        if wide:
            lines += [f"xor.b32 signs, {word}, 0x80808080;", f"mov.b32 factor, {{{other}, {other}}};"]
        for i in (0, 1):
            source = "signs" if wide else word
            lines.append(f"prmt.b32 numbers, {source}, base, {0x5352 if i else 0x5150:#x};")
            negative = has_minima and i == 1
            signs = "minus_one, base" if negative else "one, minus_base"
            lines.append(f"fma.rn.f16x2 numbers, numbers, {signs};")
            if has_minima:
                lines.append(f"mov.b32 {{low, high}}, {other};")
                lines.append(f"mov.b32 factor, {{{'high, high' if i else 'low, low'}}};")
            lines.append("mul.rn.f16x2 numbers, numbers, factor;")
            lines += _two_halves("numbers", 2 * i, is_bfloat16)
    else:
        lines += _two_halves(word, 0, is_bfloat16)
        if has_minima:
            lines.append(f"xor.b32 numbers, {other}, {_twice(0x8000):#x};")
            lines += _two_halves("numbers", 2, is_bfloat16)
    inputs = ["r", "h" if wide else "r"] if has_supers or has_minima else ["r"]
    return "{\n" + "\n".join(lines) + "\n}", ",".join(["=&h"] * halves + inputs)


@triton.constexpr_function
def _two_halves(source: str, first: int, is_bfloat16: bool) -> list[str]:
    """Return PTX that splits a pair of float16 numbers and rounds them to the weights' dtype."""
    out = f"{{${first}, ${first + 1}}}"
    if not is_bfloat16:
        return [f"mov.b32 {out}, {source};"]
    return [
        f"mov.b32 {{low, high}}, {source};",
        "cvt.f32.f16 low_number, low;",
        "cvt.f32.f16 high_number, high;",
        "cvt.rn.bf16x2.f32 numbers, high_number, low_number;",
        f"mov.b32 {out}, numbers;",
    ]


@triton.constexpr_function
def _first(pair: tuple[str, str]) -> str:
    return pair[0]


@triton.constexpr_function
def _second(pair: tuple[str, str]) -> str:
    return pair[1]


@triton.constexpr_function
def _repeated(dtype: tl.dtype, times: int) -> tuple[tl.dtype, ...]:
    return (dtype,) * times


@triton.jit
def _scales(
    scales: tl.tensor,
    minima: tl.tensor,
    supers: tl.tensor,
    dtype: tl.constexpr,
    has_minima: tl.constexpr,
    has_supers: tl.constexpr,
) -> tl.tuple:
    """Return the scales of each chunk's groups, or two scales and two negative minima, in ``dtype``."""
    code: tl.constexpr = scales_assembly(has_minima, has_supers, dtype == tl.bfloat16)
    text: tl.constexpr = _first(code)
    operands: tl.constexpr = _second(code)
    results: tl.constexpr = _repeated(dtype, 4 if has_minima or has_supers else 2)
    if has_supers:
        found = tl.inline_asm_elementwise(text, operands, [scales, supers], results, True, 1)
    elif has_minima:
        found = tl.inline_asm_elementwise(text, operands, [scales, minima], results, True, 1)
    else:
        found = tl.inline_asm_elementwise(text, operands, [scales], results, True, 1)
    return found


@triton.jit
def _half_of_fields(
    words: tl.tensor,
    high: tl.tensor,
    scale: tl.tensor,
    minimum: tl.tensor,
    half: tl.constexpr,
    dtype: tl.constexpr,
    bits: tl.constexpr,
    offset: tl.constexpr,
    has_minima: tl.constexpr,
) -> tl.tuple:
    """Decode the fields in one half of each word; scale and minimum have one element per chunk, broadcast to words."""
    code: tl.constexpr = fields_assembly(half, bits, offset, has_minima, dtype == tl.bfloat16)
    text: tl.constexpr = _first(code)
    operands: tl.constexpr = _second(code)
    results: tl.constexpr = _repeated(dtype, 2 if bits == 8 else 4)
    has_high: tl.constexpr = bits == 5 or bits == 6
    if has_high and has_minima:
        found = tl.inline_asm_elementwise(text, operands, [words, high, scale, minimum], results, True, 2)
    elif has_high:
        found = tl.inline_asm_elementwise(text, operands, [words, high, scale], results, True, 2)
    elif has_minima:
        found = tl.inline_asm_elementwise(text, operands, [words, scale, minimum], results, True, 2)
    else:
        found = tl.inline_asm_elementwise(text, operands, [words, scale], results, True, 2)
    return found


@triton.jit
def decode_fields(
    tile: tl.tuple,
    block_c: tl.constexpr,
    dtype: tl.constexpr,
    bits: tl.constexpr,
    offset: tl.constexpr,
    group: tl.constexpr,
    has_minima: tl.constexpr,
    has_supers: tl.constexpr,
) -> tl.tuple:
    """Decode every field of a tile's words, ``[n, block_c, words of a chunk]`` each.

    :param tile: a result of :func:`~paged_sdk.kernels.triton.blocks.load_tile`
    :param dtype: float16 or bfloat16
    """
    words: tl.constexpr = 16 if bits == 8 else 8
    block_n: tl.constexpr = tile[0].shape[0]
    quants = tl.reshape(tile[0], [block_n, block_c, words])
    high = tl.reshape(tile[1].to(tl.int16), [block_n, block_c, words])
    scales, minima, supers = tile[2]
    parts = _scales(scales, minima, supers, dtype, has_minima, has_supers)
    low_scale = parts[0][:, :, None]
    low_minimum = parts[2 if has_minima else 0][:, :, None]
    second = parts[1][:, :, None]
    if group == 16:
        # Each half of a word has fields of two groups. Fields decoded with the other group's scale are not used.
        third = parts[2][:, :, None]
        fourth = parts[3][:, :, None]
        a = _half_of_fields(quants, high, low_scale, low_scale, 0, dtype, bits, offset, False)
        b = _half_of_fields(quants, high, second, second, 0, dtype, bits, offset, False)
        c = _half_of_fields(quants, high, third, third, 1, dtype, bits, offset, False)
        d = _half_of_fields(quants, high, fourth, fourth, 1, dtype, bits, offset, False)
        fields = (a[0], a[1], b[2], b[3], c[0], c[1], d[2], d[3])
    else:
        minimum = parts[3 if has_minima else 0][:, :, None]
        a = _half_of_fields(quants, high, low_scale, low_minimum, 0, dtype, bits, offset, has_minima)
        b = _half_of_fields(quants, high, second, minimum, 1, dtype, bits, offset, has_minima)
        fields = a + b
    return fields

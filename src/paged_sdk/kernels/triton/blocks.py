"""Decodes repacked matrices (:mod:`paged_sdk.kernels.quantized.triton_blocks`), within kernels or to memory."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_sdk.kernels.quantized.triton_blocks import CHUNK, TritonBlockMatrix

__all__ = [
    "ONE",
    "decode_pair",
    "decode_tile",
    "dequantize",
    "dequantize_rows",
    "format_arguments",
    "group_minimum",
    "group_scale",
    "load_high",
    "load_scale_words",
    "load_tile",
    "load_words",
    "loop_arguments",
    "scale_parts",
    "side_by_side",
]

# The bits of the float32 number 1. It is passed to kernels as an argument, because ptxas makes one instruction of
# ``(word & mask) | one`` only if one of the two constants is not an immediate.
ONE: Final = 0x3F800000

_DECODED_ROWS: Final = 4
_DECODED_CHUNKS: Final = 8
_DECODING_WARPS: Final = 2


def dequantize(matrix: TritonBlockMatrix, dtype: torch.dtype) -> Tensor:
    """Decode the weights, ``[rows, cols]``; they may differ from :meth:`TritonBlockMatrix.decoded` in the last bits."""
    return _decode(matrix, None, matrix.rows, dtype)


def dequantize_rows(matrix: TritonBlockMatrix, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """See :func:`paged_sdk.kernels.decode_rows.decode_rows`."""
    return _decode(matrix, indices.contiguous(), len(indices), dtype)


def _decode(matrix: TritonBlockMatrix, indices: Tensor | None, num_rows: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty(num_rows, matrix.cols, dtype=dtype, device=matrix.quants.device)
    if num_rows == 0:
        return out
    _dequantize_kernel[(triton.cdiv(num_rows, _DECODED_ROWS), triton.cdiv(matrix.chunks, _DECODED_CHUNKS))](
        *matrix.parts,
        indices,
        out,
        num_rows,
        matrix.cols,
        matrix.chunks,
        ONE,
        block_n=_DECODED_ROWS,
        **loop_arguments(matrix, _DECODED_CHUNKS),
        num_warps=_DECODING_WARPS,
    )
    return out


def format_arguments(matrix: TritonBlockMatrix, *, prefix: str = "") -> dict[str, Any]:
    form = matrix.format
    return {
        f"{prefix}bits": form.bits,
        f"{prefix}offset": form.offset,
        f"{prefix}group": form.group,
        f"{prefix}has_minima": form.has_minima,
        f"{prefix}has_supers": form.has_supers,
    }


def loop_arguments(
    matrix: TritonBlockMatrix, block_c: int, *, num_matrices: int = 1, prefix: str = ""
) -> dict[str, Any]:
    """Return a kernel's arguments for a loop over the chunks of a row, or of rows of several matrices.

    :param block_c: chunks per iteration
    """
    return {
        f"{prefix}block_c": block_c,
        f"{prefix}masked": num_matrices * matrix.chunks % block_c != 0 or matrix.cols % CHUNK != 0,
        **format_arguments(matrix, prefix=prefix),
    }


@triton.jit
def _shifted(words: tl.tensor, by: tl.constexpr) -> tl.tensor:
    return words << by if by >= 0 else words >> -by


@triton.jit
def _half(bits: tl.tensor) -> tl.tensor:
    """Read the float16 in the low half of a word."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def decode_pair(words: tl.tensor, high: tl.tensor, one: tl.tensor, pair: tl.constexpr, bits: tl.constexpr) -> tl.tensor:
    """Decode two fields of each word as float32 numbers in [1, 2): half a shift, one LOP3 and no conversion per field.

    A field's bits, placed in the mantissa of 1, form a float without a conversion. The odd field ends at the mantissa's
    top, which gives ``1 + field / 2**bits``. The even field is four bits lower, as in the word, so that one shift is
    enough; it gives ``1 + field / 2**(bits + 4)``. Callers subtract the ones from the sum of products. The ones cost at
    most 10 of float32's 24 bits of precision; the rest still exceeds that of 16-bit activations.
    """
    top: tl.constexpr = 23 - bits
    if bits == 8:
        even = (_shifted(words, top - 16 * pair) & (255 << top)) | one
        odd = (_shifted(words, top - 16 * pair - 8) & (255 << top)) | one
    else:
        low = _shifted(words, top - 4 - 8 * pair)
        even = (low & (15 << (top - 4))) | one
        odd = (low & (15 << top)) | one
        if bits > 4:
            position: tl.constexpr = pair if bits == 5 else 2 * pair + 4 * (pair // 2)
            above = _shifted(high, top - position)
            mask: tl.constexpr = (1 << (bits - 4)) - 1
            # An "or", written as "xor" so that LLVM keeps an order for which ptxas needs no third instruction.
            even = even ^ (above & (mask << top))
            odd = odd ^ (above & (mask << (top + 4)))
    return even.to(tl.float32, bitcast=True), odd.to(tl.float32, bitcast=True)


@triton.jit
def load_words(pointers: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load words, with zeros where ``mask`` is False. None: load all words."""
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)


@triton.jit
def load_high(
    high_ptr: tl.tensor, offsets: tl.tensor, mask: tl.tensor, words: tl.tensor, bits: tl.constexpr
) -> tl.tensor:
    return load_words(high_ptr + offsets, mask).to(tl.int32) if bits == 5 or bits == 6 else words


@triton.jit
def load_scale_words(
    scales_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    supers_ptr: tl.tensor,
    row: tl.tensor,
    chunk: tl.tensor,
    chunks: tl.tensor,
    mask: tl.tensor,
    has_minima: tl.constexpr,
    has_supers: tl.constexpr,
) -> tl.tuple:
    """Load the words of scales, minima and supers of chunks; missing parts are replaced by the scales."""
    scales = load_words(scales_ptr + row * chunks + chunk, mask)
    minima = scales
    supers = scales
    if has_supers:
        supers = load_words(supers_ptr + row * (chunks // 4) + chunk // 4, mask)
    elif has_minima:
        minima = load_words(minima_ptr + row * chunks + chunk, mask)
    return scales, minima, supers


@triton.jit
def scale_parts(words: tl.tuple, has_minima: tl.constexpr, has_supers: tl.constexpr) -> tl.tuple:
    """Return scales, minima, and the supers of each, from the result of :func:`load_scale_words`."""
    scales, minima, supers = words
    super_scale = 1.0
    super_minimum = 1.0
    if has_supers:
        if has_minima:
            super_scale = _half(supers)
            super_minimum = _half(supers >> 16)
        else:
            super_scale = supers.to(tl.float32)
    return scales, minima, super_scale, super_minimum


@triton.jit
def group_scale(
    parts: tl.tensor, index: tl.constexpr, unit: tl.constexpr, has_minima: tl.constexpr, has_supers: tl.constexpr
) -> tl.tensor:
    """Compute ``unit`` times the scale of each chunk's group ``index``, from the result of :func:`scale_parts`."""
    if has_supers:
        unsigned, signed = (parts[0] >> (8 * index)) & 255, (parts[0] << (24 - 8 * index)) >> 24
        number = unsigned if has_minima else signed
        scale = (parts[2] * unit) * number.to(tl.float32)
    else:
        scale = _half(parts[0] >> (16 * index)) * unit
    return scale


@triton.jit
def group_minimum(parts: tl.tensor, index: tl.constexpr, has_supers: tl.constexpr) -> tl.tensor:
    if has_supers:
        number = (parts[0] >> (16 + 8 * index)) & 255
        minimum = parts[3] * number.to(tl.float32)
    else:
        minimum = _half(parts[1] >> (16 * index))
    return minimum


@triton.jit
def load_tile(
    quants_ptr: tl.tensor,
    high_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    supers_ptr: tl.tensor,
    row: tl.tensor,
    start: tl.tensor,
    chunks: tl.tensor,
    last_chunk: tl.tensor,
    block_c: tl.constexpr,
    masked: tl.constexpr,
    bits: tl.constexpr,
    has_minima: tl.constexpr,
    has_supers: tl.constexpr,
) -> tl.tensor:
    """Load the words of ``block_c`` chunks of rows ``[n, 1]``, their high bits and the words of their scales."""
    words: tl.constexpr = 16 if bits == 8 else 8
    word = tl.arange(0, block_c * words)[None, :]
    chunk = start + tl.arange(0, block_c)[None, :]
    word_mask = start + word // words < last_chunk if masked else None
    chunk_mask = chunk < last_chunk if masked else None
    offsets = row * (chunks * words) + start * words + word
    quants = load_words(quants_ptr + offsets, word_mask)
    high = load_high(high_ptr, offsets, word_mask, quants, bits)
    scales = load_scale_words(
        scales_ptr, minima_ptr, supers_ptr, row, chunk, chunks, chunk_mask, has_minima, has_supers
    )
    return quants, high, scales


@triton.jit
def decode_tile(
    tile: tl.tensor,
    one: tl.tensor,
    index: tl.constexpr,
    pair: tl.constexpr,
    block_c: tl.constexpr,
    dtype: tl.constexpr,
    bits: tl.constexpr,
    offset: tl.constexpr,
    has_minima: tl.constexpr,
    has_supers: tl.constexpr,
) -> tl.tensor:
    """Decode two fields in group ``index`` of each chunk, ``[n, block_c, words of a chunk]`` each, exactly.

    Scales and weights are multiplied as three-dimensional tensors: broadcast over a chunk's words first, scales would
    pass through shared memory at that size.

    :param tile: a result of :func:`load_tile`
    """
    words: tl.constexpr = 16 if bits == 8 else 8
    levels: tl.constexpr = 1 << bits
    even_lead: tl.constexpr = 1 if bits == 8 else 16
    even, odd = decode_pair(tile[0], tile[1], one, pair, bits)
    block_n: tl.constexpr = even.shape[0]
    parts = scale_parts(tile[2], has_minima, has_supers)
    scale = group_scale(parts, index, levels, has_minima, has_supers)[:, :, None]
    base = scale * (1 + offset / levels)
    if has_minima:
        base += group_minimum(parts, index, has_supers)[:, :, None]
    even = tl.reshape(even, [block_n, block_c, words]) * (scale * even_lead) - (base + scale * (even_lead - 1))
    odd = tl.reshape(odd, [block_n, block_c, words]) * scale - base
    return even.to(dtype), odd.to(dtype)


@triton.jit
def side_by_side(fields: tl.tuple) -> tl.tensor:
    """Arrange the fields of words, ``[n, chunks, words]`` each, in the order of weights, ``[n, chunks, .., words]``."""
    low = tl.join(tl.join(fields[0], fields[1]), tl.join(fields[2], fields[3]))
    if len(fields) == 4:
        ordered = tl.permute(low, (0, 1, 4, 3, 2))
    else:
        high = tl.join(tl.join(fields[4], fields[5]), tl.join(fields[6], fields[7]))
        ordered = tl.permute(tl.join(low, high), (0, 1, 5, 4, 3, 2))
    return ordered


@triton.jit
def _dequantize_kernel(
    quants_ptr: tl.tensor,
    high_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    supers_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    chunks: tl.tensor,
    one: tl.tensor,
    block_n: tl.constexpr,
    block_c: tl.constexpr,
    masked: tl.constexpr,
    bits: tl.constexpr,
    offset: tl.constexpr,
    group: tl.constexpr,
    has_minima: tl.constexpr,
    has_supers: tl.constexpr,
) -> None:
    """Write the weights ``out[n, k]`` of row n, or of row ``indices[n]`` if indices are given.

    The fields of a word are weights far apart: written as decoded, each store would be of 8 bytes, a quarter of a
    memory transaction. So they are reordered through shared memory first, and each thread writes 16 contiguous bytes.
    """
    words: tl.constexpr = 16 if bits == 8 else 8
    pairs: tl.constexpr = 32 // words
    pairs_of_group: tl.constexpr = pairs * group // 64
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    row = tl.minimum(n, rows - 1)
    if indices_ptr is not None:
        row = tl.load(indices_ptr + row)
    start = tl.program_id(1) * block_c
    tile = load_tile(
        quants_ptr,
        high_ptr,
        scales_ptr,
        minima_ptr,
        supers_ptr,
        row.to(tl.int64)[:, None],
        start,
        chunks,
        chunks,
        block_c,
        masked,
        bits,
        has_minima,
        has_supers,
    )
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    fields = ()
    for p in tl.static_range(pairs):
        fields += decode_tile(tile, one, p // pairs_of_group, p, block_c, dtype, bits, offset, has_minima, has_supers)
    k = start * 64 + tl.arange(0, block_c * 64)[None, :]
    live = (n < rows)[:, None] & (k < cols) if masked else (n < rows)[:, None]
    weights = tl.reshape(side_by_side(fields), [block_n, block_c * 64])
    tl.store(out_ptr + n.to(tl.int64)[:, None] * cols + k, weights, mask=live)

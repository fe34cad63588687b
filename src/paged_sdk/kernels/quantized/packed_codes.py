"""Defines the forms in which checkpoints pack codes of a few bits.

Codes are unpacked to bytes by torch here, or by the native library while it packs a matrix (``csrc/codes.h``), without
a tensor of bytes.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.errors import CheckpointError
from paged_sdk.kernels.quantized.stored_matrix import bounds

__all__ = ["CodeForm", "PackedCodes", "unpacked"]

_EIGHT: Final = 8
# The position within a word of each of eight rows' codes, in AWQ.
_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)


class CodeForm(Enum):
    """Names the layouts of a matrix's codes in a tensor."""

    STREAM = "stream"
    """``[rows, words]`` of any integers: a row is a stream of bits from the lowest bit of its first byte on."""
    COLUMNS = "columns"
    """int32 ``[words, rows]``: the same stream, down a column."""
    HIGH_FIRST = "high first"
    """uint8 ``[rows, bytes]``: two 4-bit codes per byte, the first in the high nibble."""
    SIGNED = "signed"
    """int8 ``[rows, cols]``: codes minus 128."""
    OF_EIGHT_ROWS = "of eight rows"
    """int32 ``[cols, rows / 8]``: 4-bit codes of rows 0 2 4 6 1 3 5 7, from a word's lowest bits on (AWQ)."""


@frozen(eq=False, kw_only=True)
class PackedCodes:
    """Holds the codes of a matrix as a file packs them.

    :ivar words: the packed codes, laid out as ``form``
    :ivar shape: rows and columns of the codes
    :ivar bits: bits per code, 1 to 8
    :raises CheckpointError: the shape or dtype of ``words`` does not fit
    """

    words: Tensor
    form: CodeForm
    shape: tuple[int, int]
    bits: int

    def __attrs_post_init__(self) -> None:
        rows, cols = self.shape
        height, width = self.words.shape
        row_bytes = -(-cols * self.bits // 8)
        match self.form:
            case CodeForm.COLUMNS:
                fits = width == rows and 4 * height >= row_bytes and self.words.dtype == torch.int32
            case CodeForm.OF_EIGHT_ROWS:
                fits = height == cols and width * _EIGHT == rows and self.words.dtype == torch.int32 and self.bits == 4
            case _:
                fits = height == rows and width * self.words.itemsize >= row_bytes
        if not fits:
            raise CheckpointError(
                f"codes in {self.words.dtype} {list(self.words.shape)} are not {[rows, cols]} of {self.bits} bits"
            )

    @property
    def device(self) -> torch.device:
        """Return the device of the words."""
        return self.words.device

    def rows(self, index: slice) -> PackedCodes | Tensor:
        """Return a range of rows: packed, sharing memory, or unpacked if the range cuts a word of several rows."""
        first, last = bounds(index, self.shape[0])
        shape = (last - first, self.shape[1])
        match self.form:
            case CodeForm.COLUMNS:
                return evolve(self, words=self.words[:, first:last], shape=shape)
            case CodeForm.OF_EIGHT_ROWS:
                if first % _EIGHT or last % _EIGHT:
                    return self.bytes()[first:last]
                return evolve(self, words=self.words[:, first // _EIGHT : last // _EIGHT], shape=shape)
            case _:
                return evolve(self, words=self.words[first:last], shape=shape)

    def bytes(self) -> Tensor:
        """Return the codes, uint8 ``[rows, cols]``."""
        rows, cols = self.shape
        match self.form:
            case CodeForm.COLUMNS:
                codes = unpacked(self.words.t(), self.bits)
            case CodeForm.HIGH_FIRST:
                codes = unpacked(self.words << 4 | self.words >> 4, 4)
            case CodeForm.SIGNED:
                codes = self.words.view(torch.uint8) ^ 128
            case CodeForm.OF_EIGHT_ROWS:
                of_words = unpacked(self.words, 4).view(cols, -1, _EIGHT)
                codes = of_words[:, :, _PLACES].reshape(cols, rows).t()
            case _:
                codes = unpacked(self.words, self.bits)
        return codes[:, :cols].contiguous()


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Unpack one bit stream per row, with little-endian words.

    :param packed: of any integer type, ``[rows, words]``
    :param bits: bits per code, 1 to 8
    :returns: uint8 ``[rows, codes]`` on the device of ``packed``; bits after the last multiple of 8 codes are dropped
        unless ``bits`` divides 8
    """
    stream = packed.contiguous().view(torch.uint8)
    rows, num_bytes = stream.shape
    if bits == 8:
        return stream
    if 8 % bits == 0:
        mask = (1 << bits) - 1
        return torch.stack([stream >> shift & mask for shift in range(0, 8, bits)], dim=2).view(rows, -1)
    # 8 codes take ``bits`` bytes; some codes cross a byte boundary.
    units = stream[:, : num_bytes // bits * bits].reshape(rows, -1, bits)
    codes = units.new_empty(rows, units.shape[1], 8)
    wide = units.short()
    for index in range(8):
        byte, shift = divmod(index * bits, 8)
        value = wide[:, :, byte] >> shift
        if shift + bits > 8:
            value = value | wide[:, :, byte + 1] << 8 - shift
        codes[:, :, index] = value & (1 << bits) - 1
    return codes.view(rows, -1)

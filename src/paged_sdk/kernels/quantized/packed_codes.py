"""Defines codes of a few bits as checkpoints pack them.

They are taken out to bytes by torch here, or by the native library while it packs a matrix
(``csrc/codes.h``), which makes no tensor of bytes.
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
# The place within its word of each of eight rows' codes, in AWQ.
_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)


class CodeForm(Enum):
    """Says how the codes of a matrix lie in a tensor."""

    STREAM = "stream"
    """``[rows, words]`` of any integers: a row's codes follow one another from the lowest bit of its bytes on."""
    COLUMNS = "columns"
    """int32 ``[words, rows]``: the same stream, down a column."""
    HIGH_FIRST = "high first"
    """uint8 ``[rows, bytes]``: two codes of 4 bits in a byte, the first in its high half."""
    SIGNED = "signed"
    """int8 ``[rows, cols]``, of numbers that are codes less 128."""
    OF_EIGHT_ROWS = "of eight rows"
    """int32 ``[cols, rows / 8]``: codes of 4 bits, those of rows 0 2 4 6 1 3 5 7 from a word's lowest bits on."""


@frozen(eq=False, kw_only=True)
class PackedCodes:
    """Holds the codes of a matrix as a file does.

    :ivar words: as ``form`` says
    :ivar shape: rows and columns of the codes
    :ivar bits: of a code, 1 to 8
    :raises CheckpointError: there are not so many words
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
        """Return where the words are."""
        return self.words.device

    def rows(self, index: slice) -> PackedCodes | Tensor:
        """Return some consecutive rows: of the words where these do not share any, else as bytes."""
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
    """Return the codes of a bit stream per row, whose words are little-endian.

    :param packed: of any integer type, ``[rows, words]``; a row's bits are a multiple of 8 codes, or what is left over
        is no code
    :param bits: of a code, 1 to 8
    :returns: uint8 ``[rows, codes]``
    """
    stream = packed.contiguous().view(torch.uint8)
    rows, num_bytes = stream.shape
    if bits == 8:
        return stream
    if 8 % bits == 0:
        mask = (1 << bits) - 1
        return torch.stack([stream >> shift & mask for shift in range(0, 8, bits)], dim=2).view(rows, -1)
    # As many bytes as a code has bits hold 8 codes, of which some lie across two bytes.
    units = stream[:, : num_bytes // bits * bits].reshape(rows, -1, bits)
    codes = torch.empty(rows, units.shape[1], 8, dtype=torch.uint8)
    wide = units.short()
    for index in range(8):
        byte, shift = divmod(index * bits, 8)
        value = wide[:, :, byte] >> shift
        if shift + bits > 8:
            value = value | wide[:, :, byte + 1] << 8 - shift
        codes[:, :, index] = value & (1 << bits) - 1
    return codes.view(rows, -1)

"""Defines the layout of GGUF's quantized matrices on GPUs.

A GGUF block mixes scales and small integers at odd offsets (144 bytes in Q4_K, 210 in Q6_K), so 16-byte loads would not
be aligned. Here the parts of a matrix are separate arrays, row by row, and every row is divided into chunks of 64
consecutive weights:

- ``quants`` int32: a chunk is 8 words of eight 4-bit fields (formats of 4, 5 and 6 bits) or 16 words of four 8-bit
  fields. With W words in a chunk, field j of word i is weight ``W * j + i`` of the chunk. So the four words that a
  thread loads in 16 bytes need runs of four activations, and one scale per group.
- ``high``: the bits of a weight above the lowest four. 5-bit formats: uint8, one byte per word; bit ``p`` belongs to
  field ``2 p``, bit ``p + 4`` to field ``2 p + 1``. 6-bit formats: one int16 per word; the two bits of field ``2 p``
  begin at bit 0, 2, 8, 10 for p = 0, 1, 2, 3, and those of field ``2 p + 1`` four bits higher. So one shift aligns both
  fields of a pair with their low bits, which are four bits apart too.
- ``scales`` int32: one word per chunk, lowest bits first: two float16 for its two groups of 32 weights (Q4_0, Q4_1,
  Q5_0, Q5_1, Q8_0); two uint8 scales and then two uint8 minima (Q4_K, Q5_K); four int8 for groups of 16 (Q6_K).
- ``minima`` int32 (Q4_1, Q5_1): one word per chunk, two float16.
- ``supers`` (Q4_K, Q5_K, Q6_K): for every four chunks, the float16 unit of their scales; in Q4_K and Q5_K an int32
  word, with the unit of minima in its upper half.

A weight is ``scale * (field - offset) - minimum``, with unsigned fields. Scales remain small integers as in the file:
decoding is exact, and Q4_K takes 4.625 bits per weight, where premultiplied scales and minima would take 5 in float16,
rounded, or 6 in float32. The other formats take as much as in the file, except that Q5_K takes 5.625 bits instead of
5.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.kernels.quantized.gguf_blocks import tensor_type_of

__all__ = [
    "CHUNK",
    "TRITON_BLOCK_FORMATS",
    "TritonBlockFormat",
    "TritonBlockMatrix",
    "concatenate",
]

CHUNK = 64
"""Number of consecutive weights of a row that share a word of scales."""

_SUPER_BLOCK_CHUNKS = 4


@frozen
class TritonBlockFormat:
    """Describes how the weights of one tensor type are stored.

    :ivar bits: bits per weight
    :ivar offset: subtracted from every field
    :ivar group: number of weights that share a scale
    :ivar has_minima: whether groups have minima
    :ivar has_supers: whether scales are multiples of a unit per four chunks
    """

    bits: int
    offset: int
    group: int
    has_minima: bool
    has_supers: bool

    @property
    def fields(self) -> int:
        """Return the number of fields per word."""
        return 4 if self.bits == 8 else 8

    @property
    def words(self) -> int:
        """Return the number of words per chunk."""
        return CHUNK // self.fields

    @property
    def high_positions(self) -> tuple[int, ...]:
        """Return the bit position of each field's high bits; empty if there are none."""
        return {5: (0, 4, 1, 5, 2, 6, 3, 7), 6: (0, 4, 2, 6, 8, 12, 10, 14)}.get(self.bits, ())


#: Maps ggml's number of a tensor type to its GPU format.
TRITON_BLOCK_FORMATS: Mapping[int, TritonBlockFormat] = MappingProxyType(
    {
        tensor_type_of(name): form
        for name, form in {
            "Q4_0": TritonBlockFormat(bits=4, offset=8, group=32, has_minima=False, has_supers=False),
            "Q4_1": TritonBlockFormat(bits=4, offset=0, group=32, has_minima=True, has_supers=False),
            "Q5_0": TritonBlockFormat(bits=5, offset=16, group=32, has_minima=False, has_supers=False),
            "Q5_1": TritonBlockFormat(bits=5, offset=0, group=32, has_minima=True, has_supers=False),
            "Q8_0": TritonBlockFormat(bits=8, offset=128, group=32, has_minima=False, has_supers=False),
            "Q4_K": TritonBlockFormat(bits=4, offset=0, group=32, has_minima=True, has_supers=True),
            "Q5_K": TritonBlockFormat(bits=5, offset=0, group=32, has_minima=True, has_supers=True),
            "Q6_K": TritonBlockFormat(bits=6, offset=32, group=16, has_minima=False, has_supers=True),
        }.items()
    }
)


@frozen(eq=False)
class TritonBlockMatrix:
    """Holds a matrix ``[rows, cols]`` with C = ``ceil(cols / 64)`` chunks in a row, the last of them padded with zeros.

    :ivar tensor_type: ggml's number of the type
    :ivar quants: int32 ``[rows, 8 C]``, or ``[rows, 16 C]`` with 8 bits
    :ivar high: 5 bits: uint8 ``[rows, 8 C]``; 6 bits: int16 ``[rows, 8 C]``; else None
    :ivar scales: int32 ``[rows, C]``
    :ivar minima: Q4_1 and Q5_1: int32 ``[rows, C]``; else None
    :ivar supers: Q4_K and Q5_K: int32 ``[rows, C / 4]``; Q6_K: float16 ``[rows, C / 4]``; else None
    """

    tensor_type: int
    cols: int
    quants: Tensor
    high: Tensor | None
    scales: Tensor
    minima: Tensor | None
    supers: Tensor | None

    @property
    def rows(self) -> int:
        """Return the number of rows (output features)."""
        return self.quants.shape[0]

    @property
    def chunks(self) -> int:
        """Return the number of chunks per row."""
        return self.scales.shape[1]

    @property
    def format(self) -> TritonBlockFormat:
        """Return the format of the weights."""
        return TRITON_BLOCK_FORMATS[self.tensor_type]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.nbytes for part in self.parts if part is not None)

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
        """Return quants, high bits, scales, minima and supers."""
        return self.quants, self.high, self.scales, self.minima, self.supers

    def to(self, device: torch.device) -> TritonBlockMatrix:
        """Return the same matrix on a device."""
        return evolve(
            self,
            quants=self.quants.to(device),
            high=None if self.high is None else self.high.to(device),
            scales=self.scales.to(device),
            minima=None if self.minima is None else self.minima.to(device),
            supers=None if self.supers is None else self.supers.to(device),
        )

    def at(self, index: slice | Tensor) -> TritonBlockMatrix:
        """Return selected rows: a slice shares memory, int indices ``[n]`` copy."""
        return evolve(
            self,
            quants=self.quants[index],
            high=None if self.high is None else self.high[index],
            scales=self.scales[index],
            minima=None if self.minima is None else self.minima[index],
            supers=None if self.supers is None else self.supers[index],
        )

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode the weights, ``[rows, cols]``; in float32 they are exactly the file's."""
        form, rows, chunks = self.format, self.rows, self.chunks
        shifts = torch.arange(form.fields, dtype=torch.int32, device=self.quants.device) * (32 // form.fields)
        words = self.quants.view(rows, chunks, 1, form.words)
        quants = (words >> shifts[:, None]) & (255 if form.bits == 8 else 15)
        if self.high is not None:
            positions = torch.tensor(form.high_positions, dtype=torch.int32, device=self.high.device)
            high = self.high.view(rows, chunks, 1, form.words).int() >> positions[:, None]
            quants |= (high & ((1 << (form.bits - 4)) - 1)) << 4
        grouped = (quants.view(rows, chunks, CHUNK // form.group, form.group) - form.offset).float()
        scales, minima = _decoded_scales(self)
        grouped *= scales.unsqueeze(-1)
        if minima is not None:
            grouped -= minima.unsqueeze(-1)
        return grouped.view(rows, chunks * CHUNK)[:, : self.cols].to(dtype)


def concatenate(matrices: Sequence[TritonBlockMatrix]) -> TritonBlockMatrix:
    """Concatenate matrices of one type and width by rows, so that layers with the same input take one launch."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    return TritonBlockMatrix(
        tensor_type=first.tensor_type,
        cols=first.cols,
        quants=torch.cat([matrix.quants for matrix in matrices]),
        high=_concatenate_optional([matrix.high for matrix in matrices]),
        scales=torch.cat([matrix.scales for matrix in matrices]),
        minima=_concatenate_optional([matrix.minima for matrix in matrices]),
        supers=_concatenate_optional([matrix.supers for matrix in matrices]),
    )


def _concatenate_optional(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def _decoded_scales(matrix: TritonBlockMatrix) -> tuple[Tensor, Tensor | None]:
    """Return scales and minima in float32, ``[rows, C, groups of a chunk]``, multiplied by their supers."""
    form, (rows, chunks) = matrix.format, matrix.scales.shape
    shape = (rows, chunks, CHUNK // form.group)
    if matrix.supers is None:
        scales = matrix.scales.view(torch.float16).view(shape).float()
        return scales, None if matrix.minima is None else matrix.minima.view(torch.float16).view(shape).float()
    supers = matrix.supers.view(torch.float16).view(rows, chunks // _SUPER_BLOCK_CHUNKS, 1, 1 + form.has_minima).float()
    supers = supers.expand(-1, -1, _SUPER_BLOCK_CHUNKS, -1).reshape(rows, chunks, 1 + form.has_minima)
    if not form.has_minima:
        return supers * matrix.scales.view(torch.int8).view(shape), None
    numbers = matrix.scales.view(torch.uint8).view(rows, chunks, 4)
    return supers[..., :1] * numbers[..., :2], supers[..., 1:] * numbers[..., 2:]

"""GGUF's quantised matrices in a layout that GPUs read well.

A GGUF block mixes scales and small integers at odd offsets (144 bytes in Q4_K, 210 in Q6_K), so no load of 16 bytes is
aligned. Here the parts of a matrix lie in arrays of their own, row by row, and every row is cut into chunks of 64
consecutive weights:

- ``quants`` int32: a chunk is 8 words of eight 4-bit fields (formats of 4, 5 and 6 bits) or 16 words of four 8-bit
  fields. With W words in a chunk, field j of word i belongs to weight ``W * j + i`` of the chunk: what a thread reads
  in 16 bytes, four words, meets runs of four activations, and one scale per group.
- ``high``: the bits of a weight above the lowest four. 5-bit formats: uint8, a byte for each word; bit ``p`` belongs to
  field ``2 p``, bit ``p + 4`` to field ``2 p + 1``. 6-bit formats: int16 for each word; the two bits of field ``2 p``
  begin at bit 0, 2, 8, 10 for p = 0, 1, 2, 3, and those of field ``2 p + 1`` four bits higher. So one shift brings both
  fields of a pair into place beside their low bits, which lie four bits apart too.
- ``scales`` int32: a word for each chunk, lowest bits first: two float16 for its two groups of 32 weights (Q4_0, Q4_1,
  Q5_0, Q5_1, Q8_0); two uint8 scales and then two uint8 minima (Q4_K, Q5_K); four int8 for groups of 16 (Q6_K).
- ``minima`` int32 (Q4_1, Q5_1): a word for each chunk, two float16.
- ``supers`` (Q4_K, Q5_K, Q6_K): for every four chunks, the float16 that their scales are multiples of; in Q4_K and Q5_K
  an int32 word, with the minima's in its upper half.

A weight is ``scale * (field - offset) - minimum``, fields being unsigned. Scales stay in the small integers in which
the file has them: decoding is exact, and Q4_K takes 4.625 bits per weight, where scales and minima multiplied out would
take 5 in float16, rounded, or 6 in float32. The other formats take what they take in the file, but for Q5_K's 5.625
instead of 5.5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.errors import UnsupportedQuantizationError
from paged_sdk.kernels.checks import check_tensor
from paged_sdk.kernels.fallback import log_fallback, why_not_triton
from paged_sdk.kernels.gguf_blocks import (
    BlockMatrix,
    bit_pairs,
    bit_planes,
    bits_in_order,
    block_format,
    nibbles,
    six_bit_scales,
    tensor_type_of,
)

__all__ = [
    "CHUNK",
    "REPACKED_FORMATS",
    "RepackedFormat",
    "RepackedMatrix",
    "concatenate",
    "decode_rows",
    "decode_rows_reference",
    "repack",
]

CHUNK = 64
"""Weights of a row that share a word of scales."""

# Weights repacked at once: temporaries of some tens of MiB, whatever the matrix's size.
_WEIGHTS_AT_ONCE = 1 << 22

_SUPER_BLOCK_CHUNKS = 4


@frozen
class RepackedFormat:
    """How the weights of one tensor type are stored.

    :ivar bits: of a weight
    :ivar offset: taken off every field
    :ivar group: weights that share a scale
    :ivar has_minima: whether groups have minima
    :ivar has_supers: whether scales are multiples of a number for every four chunks
    """

    bits: int
    offset: int
    group: int
    has_minima: bool
    has_supers: bool

    @property
    def fields(self) -> int:
        """Fields of a word."""
        return 4 if self.bits == 8 else 8

    @property
    def words(self) -> int:
        """Words of a chunk."""
        return CHUNK // self.fields


#: ggml's number of a tensor type -> how it is repacked.
REPACKED_FORMATS: Mapping[int, RepackedFormat] = MappingProxyType(
    {
        tensor_type_of(name): form
        for name, form in {
            "Q4_0": RepackedFormat(bits=4, offset=8, group=32, has_minima=False, has_supers=False),
            "Q4_1": RepackedFormat(bits=4, offset=0, group=32, has_minima=True, has_supers=False),
            "Q5_0": RepackedFormat(bits=5, offset=16, group=32, has_minima=False, has_supers=False),
            "Q5_1": RepackedFormat(bits=5, offset=0, group=32, has_minima=True, has_supers=False),
            "Q8_0": RepackedFormat(bits=8, offset=128, group=32, has_minima=False, has_supers=False),
            "Q4_K": RepackedFormat(bits=4, offset=0, group=32, has_minima=True, has_supers=True),
            "Q5_K": RepackedFormat(bits=5, offset=0, group=32, has_minima=True, has_supers=True),
            "Q6_K": RepackedFormat(bits=6, offset=32, group=16, has_minima=False, has_supers=True),
        }.items()
    }
)


@frozen(eq=False)
class RepackedMatrix:
    """A matrix ``[rows, cols]``; C chunks to a row, ``ceil(cols / 64)``, of which the last is filled up with zeros.

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
        """Output features."""
        return self.quants.shape[0]

    @property
    def format(self) -> RepackedFormat:
        """How the weights are stored."""
        return REPACKED_FORMATS[self.tensor_type]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts if part is not None)

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
        """Quants, high bits, scales, minima and supers."""
        return self.quants, self.high, self.scales, self.minima, self.supers

    def to(self, device: torch.device) -> RepackedMatrix:
        """The same matrix on a device."""
        return evolve(
            self,
            quants=self.quants.to(device),
            high=None if self.high is None else self.high.to(device),
            scales=self.scales.to(device),
            minima=None if self.minima is None else self.minima.to(device),
            supers=None if self.supers is None else self.supers.to(device),
        )

    def at(self, index: slice | Tensor) -> RepackedMatrix:
        """Some rows: a slice's share the memory, those at int indices ``[n]`` are copied."""
        return evolve(
            self,
            quants=self.quants[index],
            high=None if self.high is None else self.high[index],
            scales=self.scales[index],
            minima=None if self.minima is None else self.minima[index],
            supers=None if self.supers is None else self.supers[index],
        )

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights, ``[rows, cols]``: in float32 exactly the file's."""
        form, rows = self.format, self.rows
        chunks = self.scales.shape[1]
        shifts = torch.arange(form.fields, dtype=torch.int32, device=self.quants.device) * (32 // form.fields)
        words = self.quants.view(rows, chunks, 1, form.words)
        quants = (words >> shifts[:, None]) & (255 if form.bits == 8 else 15)
        if self.high is not None:
            positions = torch.tensor(_HIGH_POSITIONS[form.bits], dtype=torch.int32, device=self.high.device)
            high = self.high.view(rows, chunks, 1, form.words).int() >> positions[:, None]
            quants |= (high & ((1 << (form.bits - 4)) - 1)) << 4
        grouped = (quants.view(rows, chunks, CHUNK // form.group, form.group) - form.offset).float()
        scales, minima = _decoded_scales(self)
        grouped *= scales.unsqueeze(-1)
        if minima is not None:
            grouped -= minima.unsqueeze(-1)
        return grouped.view(rows, chunks * CHUNK)[:, : self.cols].to(dtype)


def decode_rows(matrix: RepackedMatrix, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows of a matrix's weights.

    :param indices: ``[n]`` int64 or int32, on the matrix's device
    :param dtype: float32, float16 or bfloat16
    :returns: ``[n, cols]``
    :raises ConfigError: ``indices`` have another shape, dtype or device
    """
    check_tensor("indices", indices, ("n",), (torch.int64, torch.int32), matrix.quants.device)
    if (reason := why_not_triton(matrix.quants)) is None:
        from paged_sdk.kernels.triton import repacked as triton_kernels

        return triton_kernels.dequantise_rows(matrix, indices, dtype)
    log_fallback("decode_rows", reason)
    return decode_rows_reference(matrix, indices, dtype)


def decode_rows_reference(matrix: RepackedMatrix, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`decode_rows` by torch's operations."""
    return matrix.at(indices).decoded(dtype)


def repack(matrix: BlockMatrix) -> RepackedMatrix:
    """Repack a matrix on the device where it lies; no weight changes its value.

    :raises UnsupportedQuantizationError: the type is not one of :data:`REPACKED_FORMATS`
    """
    split = _SPLITTERS.get(matrix.tensor_type)
    if split is None:
        name = block_format(matrix.tensor_type).name
        supported = tuple(block_format(number).name for number in sorted(REPACKED_FORMATS))
        raise UnsupportedQuantizationError(
            f"{name} weights cannot be repacked for a GPU: supported are {', '.join(supported)}",
            quantization=name,
            supported=supported,
        )
    rows, cols = matrix.shape
    step = max(1, _WEIGHTS_AT_ONCE // cols)
    return concatenate(
        [
            _repack_rows(evolve(matrix, blocks=matrix.blocks[start : start + step]), split)
            for start in range(0, rows, step)
        ]
    )


def concatenate(matrices: Sequence[RepackedMatrix]) -> RepackedMatrix:
    """Matrices of one type and width, one below the other: linear layers of one input as one launch."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    return RepackedMatrix(
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


@frozen(eq=False)
class _Split:
    """Blocks taken apart.

    :ivar fields: uint8 ``[blocks, elements]``, in the order of the weights
    :ivar scales: ``[blocks, groups]``, float16, uint8 or int8
    :ivar minima: likewise or None
    :ivar supers: float16 ``[blocks, 1]``, or with minima ``[blocks, 2]``, or None
    """

    fields: Tensor
    scales: Tensor
    minima: Tensor | None = None
    supers: Tensor | None = None


def _halves(blocks: Tensor, offset: int, count: int = 1) -> Tensor:
    return blocks[:, offset : offset + 2 * count].contiguous().view(torch.float16)


def _split_q4_0(blocks: Tensor) -> _Split:
    return _Split(nibbles(blocks[:, 2:], 16), _halves(blocks, 0))


def _split_q4_1(blocks: Tensor) -> _Split:
    return _Split(nibbles(blocks[:, 4:], 16), _halves(blocks, 0), -_halves(blocks, 2))


def _split_q5_0(blocks: Tensor) -> _Split:
    return _Split(nibbles(blocks[:, 6:], 16) | (bits_in_order(blocks[:, 2:6]) << 4), _halves(blocks, 0))


def _split_q5_1(blocks: Tensor) -> _Split:
    low, high = nibbles(blocks[:, 8:], 16), bits_in_order(blocks[:, 4:8])
    return _Split(low | (high << 4), _halves(blocks, 0), -_halves(blocks, 2))


def _split_q8_0(blocks: Tensor) -> _Split:
    return _Split(blocks[:, 2:] ^ 128, _halves(blocks, 0))  # two's complement to an offset of 128


def _split_q4_k(blocks: Tensor) -> _Split:
    return _Split(nibbles(blocks[:, 16:], 32), *six_bit_scales(blocks), _halves(blocks, 0, 2))


def _split_q5_k(blocks: Tensor) -> _Split:
    low, high = nibbles(blocks[:, 48:], 32), bit_planes(blocks[:, 16:48])
    return _Split(low | (high << 4), *six_bit_scales(blocks), _halves(blocks, 0, 2))


def _split_q6_k(blocks: Tensor) -> _Split:
    low, high = nibbles(blocks[:, :128], 64), bit_pairs(blocks[:, 128:192], 32)
    return _Split(low | (high << 4), blocks[:, 192:208].view(torch.int8), supers=_halves(blocks, 208))


_SPLITTERS: Mapping[int, Callable[[Tensor], _Split]] = MappingProxyType(
    {
        tensor_type_of(name): split
        for name, split in {
            "Q4_0": _split_q4_0,
            "Q4_1": _split_q4_1,
            "Q5_0": _split_q5_0,
            "Q5_1": _split_q5_1,
            "Q8_0": _split_q8_0,
            "Q4_K": _split_q4_k,
            "Q5_K": _split_q5_k,
            "Q6_K": _split_q6_k,
        }.items()
    }
)

# Where the high bits of each field begin.
_HIGH_POSITIONS = MappingProxyType({5: (0, 4, 1, 5, 2, 6, 3, 7), 6: (0, 4, 2, 6, 8, 12, 10, 14)})


def _repack_rows(matrix: BlockMatrix, split: Callable[[Tensor], _Split]) -> RepackedMatrix:
    """Repack all rows at once."""
    rows, cols = matrix.shape
    form = REPACKED_FORMATS[matrix.tensor_type]
    parts = split(matrix.blocks.reshape(-1, block_format(matrix.tensor_type).num_bytes))
    # Only formats with blocks of 32 leave half a chunk to fill up.
    chunks = -(-cols // CHUNK)
    groups = chunks * CHUNK // form.group
    fields = _fill_up(parts.fields.view(rows, cols), chunks * CHUNK).view(rows, chunks, form.fields, form.words)
    scales = _fill_up(parts.scales.reshape(rows, -1), groups)
    minima = None if parts.minima is None else _words(_fill_up(parts.minima.reshape(rows, -1), groups))
    supers = None if parts.supers is None else parts.supers.reshape(rows, -1)
    if parts.minima is not None and supers is not None:
        pair = (rows, chunks, 2)
        scales = torch.stack((scales.view(pair), parts.minima.reshape(pair)), dim=2)
        minima, supers = None, _words(supers)
    return RepackedMatrix(
        tensor_type=matrix.tensor_type,
        cols=cols,
        quants=_quants(fields),
        high=_high(fields, form),
        scales=_words(scales),
        minima=minima,
        supers=supers,
    )


def _fill_up(values: Tensor, width: int) -> Tensor:
    """``[rows, n]`` to ``[rows, width]``, zeros behind the last."""
    return values if values.shape[1] == width else F.pad(values, (0, width - values.shape[1]))


def _words(values: Tensor) -> Tensor:
    """``[rows, ...]`` of small numbers to ``[rows, n]`` int32."""
    # A copy: a slice of a block need not be aligned to words.
    values = values.clone(memory_format=torch.contiguous_format)
    return values.view(len(values), -1).view(torch.int32)


def _quants(fields: Tensor) -> Tensor:
    """uint8 ``[rows, C, fields, words]`` to int32 ``[rows, C * words]``: fields of 8 bits, else the low 4 bits."""
    if fields.shape[2] == 8:
        fields = (fields[:, :, 0::2] & 15) | (fields[:, :, 1::2] << 4)
    return _words(fields.transpose(2, 3))


def _high(fields: Tensor, form: RepackedFormat) -> Tensor | None:
    """The bits above the lowest four."""
    if form.bits not in _HIGH_POSITIONS:
        return None
    dtype = torch.uint8 if form.bits == 5 else torch.int16
    high = torch.zeros(*fields.shape[:2], form.words, dtype=dtype, device=fields.device)
    for field, position in enumerate(_HIGH_POSITIONS[form.bits]):
        high |= (fields[:, :, field] >> 4).to(dtype) << position
    return high.view(len(fields), -1)


def _decoded_scales(matrix: RepackedMatrix) -> tuple[Tensor, Tensor | None]:
    """Scales and minima multiplied out, float32 ``[rows, C, groups of a chunk]``."""
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

"""Repacks GGUF blocks into the layout of the GPU kernels (:mod:`paged_sdk.kernels.quantized.triton_blocks`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import UnsupportedQuantizationError
from paged_sdk.kernels.quantized.block_bits import bit_pairs, bit_planes, bits_in_order, nibbles
from paged_sdk.kernels.quantized.gguf_blocks import (
    BlockMatrix,
    block_format,
    six_bit_scales,
    tensor_type_of,
)
from paged_sdk.kernels.quantized.triton_blocks import (
    CHUNK,
    TRITON_BLOCK_FORMATS,
    TritonBlockFormat,
    TritonBlockMatrix,
    concatenate,
)

__all__ = ["REPACKABLE_TYPES", "repack"]

# Weights repacked at once, so that temporaries take some tens of MiB.
_WEIGHTS_AT_ONCE = 1 << 22


def repack(matrix: BlockMatrix) -> TritonBlockMatrix:
    """Repack a matrix on its own device, without loss.

    :raises UnsupportedQuantizationError: the type is not one of :data:`REPACKABLE_TYPES`
    """
    split = _SPLITTERS.get(matrix.tensor_type)
    if split is None:
        name = block_format(matrix.tensor_type).name
        supported = tuple(block_format(number).name for number in sorted(REPACKABLE_TYPES))
        raise UnsupportedQuantizationError(
            f"{name} weights cannot be repacked for a GPU: supported are {', '.join(supported)}",
            quantization=name,
            supported=supported,
        )
    step = max(1, _WEIGHTS_AT_ONCE // matrix.shape[1])
    return concatenate([_repack_rows(part, split) for part in matrix.parts(step)])


@frozen(eq=False)
class _Split:
    """Holds the parts of blocks as separate tensors.

    :ivar fields: uint8 ``[blocks, elements]``, in the order of the weights
    :ivar scales: ``[blocks, groups]``, float16, uint8 or int8
    :ivar minima: like ``scales``, or None if the format has no minima
    :ivar supers: the scale of scales, and with minima that of minima, float16 ``[blocks, 1 or 2]``, or None
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
    return _Split(blocks[:, 2:] ^ 128, _halves(blocks, 0))  # from two's complement to offset 128


def _split_q3_k(blocks: Tensor) -> _Split:
    """Split into the parts of Q6_K, which has the same groups and a range of scales that includes Q3_K's. Fields are
    raised by 28, the difference of the formats' offsets.
    """
    low, third = bit_pairs(blocks[:, 32:96], 32), bit_planes(blocks[:, :32])
    scales = nibbles(blocks[:, 96:104], 8) | (bit_pairs(blocks[:, 104:108], 4) << 4)
    return _Split((low | (third << 2)) + 28, (scales.to(torch.int8) - 32), supers=_halves(blocks, 108))


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
            "Q3_K": _split_q3_k,
            "Q4_K": _split_q4_k,
            "Q5_K": _split_q5_k,
            "Q6_K": _split_q6_k,
        }.items()
    }
)

REPACKABLE_TYPES = frozenset(_SPLITTERS)
"""ggml's numbers of the types that can be repacked."""

# Types that are repacked into the layout of another type.
_LAYOUTS = {tensor_type_of("Q3_K"): tensor_type_of("Q6_K")}


def _repack_rows(matrix: BlockMatrix, split: Callable[[Tensor], _Split]) -> TritonBlockMatrix:
    """Repack all rows at once."""
    rows, cols = matrix.shape
    tensor_type = _LAYOUTS.get(matrix.tensor_type, matrix.tensor_type)
    form = TRITON_BLOCK_FORMATS[tensor_type]
    parts = split(matrix.blocks.reshape(-1, block_format(matrix.tensor_type).num_bytes))
    # Only formats with blocks of 32 can leave half a chunk to pad.
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
    return TritonBlockMatrix(
        tensor_type=tensor_type,
        cols=cols,
        quants=_quants(fields),
        high=_high(fields, form),
        scales=_words(scales),
        minima=minima,
        supers=supers,
    )


def _fill_up(values: Tensor, width: int) -> Tensor:
    """Pad ``[rows, n]`` to ``[rows, width]`` with zeros at the end of each row."""
    return values if values.shape[1] == width else F.pad(values, (0, width - values.shape[1]))


def _words(values: Tensor) -> Tensor:
    """View ``[rows, ...]`` of small numbers as words, ``[rows, n]`` int32."""
    # Copied, because a slice of a block may be unaligned.
    values = values.clone(memory_format=torch.contiguous_format)
    return values.view(len(values), -1).view(torch.int32)


def _quants(fields: Tensor) -> Tensor:
    """Pack the 8 bits of four fields, or the low 4 of eight, per word. ``[rows, C, fields, words]`` uint8 ->
    ``[rows, C * words]`` int32.
    """
    if fields.shape[2] == 8:
        fields = (fields[:, :, 0::2] & 15) | (fields[:, :, 1::2] << 4)
    return _words(fields.transpose(2, 3))


def _high(fields: Tensor, form: TritonBlockFormat) -> Tensor | None:
    """Pack the bits of each field above the lowest four; return None if the format has none."""
    if not form.high_positions:
        return None
    dtype = torch.uint8 if form.bits == 5 else torch.int16
    high = torch.zeros(*fields.shape[:2], form.words, dtype=dtype, device=fields.device)
    for field, position in enumerate(form.high_positions):
        high |= (fields[:, :, field] >> 4).to(dtype) << position
    return high.view(len(fields), -1)

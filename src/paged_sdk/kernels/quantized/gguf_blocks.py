"""Defines the block formats of GGUF tensors, and decodes each to floating point.

A GGUF tensor is stored row by row; a row is a whole number of blocks, and a block holds a fixed number of elements as
small integers with one or more scales. The layouts are ggml's (``ggml-common.h``). Decoders are plain torch, run on any
device, and are bit-identical to ggml in float32. Tests compare type numbers, sizes and values with the gguf package,
which decodes with numpy on the host.

Names in the decoders: ``d`` is a block's scale, ``m`` its minimum, ``q`` the small integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import UnsupportedQuantizationError
from paged_sdk.kernels.quantized.block_bits import bit_pairs, bit_planes, bits_in_order, half, nibbles, scaled
from paged_sdk.kernels.quantized.codebook_blocks import (
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
    Q1_0,
    TQ1_0,
    TQ2_0,
    TableBlocks,
    iq1_m,
    iq1_s,
    iq2_s,
    iq2_xs,
    iq2_xxs,
    iq3_s,
    iq3_xxs,
)
from paged_sdk.kernels.quantized.stored_matrix import UnreadRows, bounds

__all__ = [
    "BLOCK_FORMATS",
    "BlockFormat",
    "BlockMatrix",
    "block_format",
    "dequantize",
    "six_bit_scales",
    "stacked",
    "tensor_type_of",
]

# Elements decoded at once, so that temporaries take a few MiB. Smaller chunks spend more time on launching operations
# (Q4_K to bfloat16 on 2 cores: 1.1 G elements/s, against 0.5 G at 1 << 16).
_CHUNK_ELEMENTS = 1 << 20

_SUPER_BLOCK = 256  # elements in a block of the K formats


def _q4_0(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 2:], 16).float().sub_(8).mul_(half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 4:], 16).float().mul_(half(blocks, 0)).add_(half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    q = nibbles(blocks[:, 6:], 16) | (bits_in_order(blocks[:, 2:6]) << 4)
    return q.float().sub_(16).mul_(half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    q = nibbles(blocks[:, 8:], 16) | (bits_in_order(blocks[:, 4:8]) << 4)
    return q.float().mul_(half(blocks, 0)).add_(half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(half(blocks, 0))


def _q2_k(blocks: Tensor) -> Tensor:
    scales, q = blocks[:, :16], bit_pairs(blocks[:, 16:80], 32)
    return scaled(q, half(blocks, 80) * (scales & 15), half(blocks, 82) * (scales >> 4))


def _q3_k(blocks: Tensor) -> Tensor:
    # A clear bit of the mask subtracts 4 from the two low bits.
    q = (bit_pairs(blocks[:, 32:96], 32) | (bit_planes(blocks[:, :32]) << 2)).to(torch.int8) - 4
    scales = nibbles(blocks[:, 96:104], 8) | (bit_pairs(blocks[:, 104:108], 4) << 4)
    return scaled(q, half(blocks, 108) * (scales.to(torch.int8) - 32))


def six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack scales and minima of the eight sub-blocks of Q4_K and Q5_K, uint8 [n, 8] each.

    Twelve bytes at offset 4 hold 16 six-bit numbers: the first four scales and minima in the low bits of bytes 0-3 and
    4-7; the other eight in the nibbles of bytes 8-11, with their two top bits in the top bits of bytes 0-7.
    """
    low_scales, low_minima, halves = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low_scales & 63, (halves & 15) | (low_scales >> 6 << 4)), dim=1)
    minima = torch.cat((low_minima & 63, (halves >> 4) | (low_minima >> 6 << 4)), dim=1)
    return scales, minima


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scales, minima = six_bit_scales(blocks)
    return half(blocks, 0) * scales, half(blocks, 2) * minima


def _q4_k(blocks: Tensor) -> Tensor:
    return scaled(nibbles(blocks[:, 16:], 32), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> Tensor:
    q = nibbles(blocks[:, 48:], 32) | (bit_planes(blocks[:, 16:48]) << 4)
    return scaled(q, *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> Tensor:
    q = (nibbles(blocks[:, :128], 64) | (bit_pairs(blocks[:, 128:192], 32) << 4)).to(torch.int8) - 32
    return scaled(q, half(blocks, 208) * blocks[:, 192:208].view(torch.int8))


@frozen
class BlockFormat:
    """Describes how the elements of one tensor type are stored, and decodes them.

    :ivar name: ggml's name
    :ivar elements: elements in a block; 1 for plain floating point
    :ivar num_bytes: bytes in a block
    :ivar decode: uint8 [blocks, num_bytes] -> floating point [blocks, elements]; float32 unless ``elements`` is 1
    :ivar table: codes, scales and table, if codes index one table; else None
    """

    name: str
    elements: int
    num_bytes: int
    decode: Callable[[Tensor], Tensor]
    table: TableBlocks | None = None


def _plain(name: str, dtype: torch.dtype) -> BlockFormat:
    return BlockFormat(name, 1, dtype.itemsize, lambda data: data.view(dtype))


#: Maps ggml's number of a tensor type to its format.
BLOCK_FORMATS: Mapping[int, BlockFormat] = MappingProxyType(
    {
        0: _plain("F32", torch.float32),
        1: _plain("F16", torch.float16),
        2: BlockFormat("Q4_0", 32, 18, _q4_0),
        3: BlockFormat("Q4_1", 32, 20, _q4_1),
        6: BlockFormat("Q5_0", 32, 22, _q5_0),
        7: BlockFormat("Q5_1", 32, 24, _q5_1),
        8: BlockFormat("Q8_0", 32, 34, _q8_0),
        10: BlockFormat("Q2_K", _SUPER_BLOCK, 84, _q2_k),
        11: BlockFormat("Q3_K", _SUPER_BLOCK, 110, _q3_k),
        12: BlockFormat("Q4_K", _SUPER_BLOCK, 144, _q4_k),
        13: BlockFormat("Q5_K", _SUPER_BLOCK, 176, _q5_k),
        14: BlockFormat("Q6_K", _SUPER_BLOCK, 210, _q6_k),
        16: BlockFormat("IQ2_XXS", _SUPER_BLOCK, 66, iq2_xxs),
        17: BlockFormat("IQ2_XS", _SUPER_BLOCK, 74, iq2_xs),
        18: BlockFormat("IQ3_XXS", _SUPER_BLOCK, 98, iq3_xxs),
        19: BlockFormat("IQ1_S", _SUPER_BLOCK, 50, iq1_s),
        20: BlockFormat("IQ4_NL", 32, 18, IQ4_NL.decode, IQ4_NL),
        21: BlockFormat("IQ3_S", _SUPER_BLOCK, 110, iq3_s),
        22: BlockFormat("IQ2_S", _SUPER_BLOCK, 82, iq2_s),
        23: BlockFormat("IQ4_XS", _SUPER_BLOCK, 136, IQ4_XS.decode, IQ4_XS),
        28: _plain("F64", torch.float64),
        29: BlockFormat("IQ1_M", _SUPER_BLOCK, 56, iq1_m),
        30: _plain("BF16", torch.bfloat16),
        34: BlockFormat("TQ1_0", _SUPER_BLOCK, 54, TQ1_0.decode, TQ1_0),
        35: BlockFormat("TQ2_0", _SUPER_BLOCK, 66, TQ2_0.decode, TQ2_0),
        39: BlockFormat("MXFP4", 32, 17, MXFP4.decode, MXFP4),
        40: BlockFormat("NVFP4", 64, 36, NVFP4.decode, NVFP4),
        41: BlockFormat("Q1_0", 128, 18, Q1_0.decode, Q1_0),
    }
)


def block_format(tensor_type: int) -> BlockFormat:
    """Return the format of a tensor type.

    :param tensor_type: ggml's number of the type
    :raises UnsupportedQuantizationError: the type has no decoder
    """
    found = BLOCK_FORMATS.get(tensor_type)
    if found is None:
        supported = tuple(known.name for known in BLOCK_FORMATS.values())
        raise UnsupportedQuantizationError(
            f"GGUF tensor type {tensor_type} cannot be read: supported are {', '.join(supported)}",
            quantization=str(tensor_type),
            supported=supported,
        )
    return found


def tensor_type_of(name: str) -> int:
    """Return ggml's number of a block format, given its name, such as "Q4_K"."""
    return next(number for number, form in BLOCK_FORMATS.items() if form.name == name)


def dequantize(tensor_type: int, data: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode a tensor.

    :param tensor_type: ggml's number of the type
    :param data: contiguous uint8 [..., bytes of a row]
    :param dtype: of the result; values are rounded from float32 chunk by chunk, without a float32 copy of the whole
        tensor
    :returns: [..., elements of a row]; shares the memory of ``data`` if that is of ``dtype`` already
    :raises UnsupportedQuantizationError: the type has no decoder
    """
    form = block_format(tensor_type)
    if form.elements == 1:
        return form.decode(data).to(dtype)
    blocks = data.reshape(-1, form.num_bytes)
    out = torch.empty(len(blocks), form.elements, dtype=dtype, device=data.device)
    step = _CHUNK_ELEMENTS // form.elements
    for start in range(0, len(blocks), step):
        out[start : start + step] = form.decode(blocks[start : start + step])
    return out.reshape(*data.shape[:-1], data.shape[-1] // form.num_bytes * form.elements)


@frozen(eq=False)
class BlockMatrix:
    """Holds a matrix in quantized blocks, row by row, as a
    :class:`~paged_sdk.kernels.quantized.stored_matrix.StoredMatrix`.

    :ivar tensor_type: ggml's number of the type
    :ivar stored: contiguous uint8 [rows, bytes of a row]
    """

    tensor_type: int
    stored: Tensor | UnreadRows

    @property
    def blocks(self) -> Tensor:
        """Return all blocks, uint8 [rows, bytes of a row], reading them from the file if necessary."""
        return self.stored if isinstance(self.stored, Tensor) else self.stored.tensor()

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and columns, in elements."""
        form = block_format(self.tensor_type)
        return self.stored.shape[0], self.stored.shape[1] // form.num_bytes * form.elements

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the blocks."""
        return self.stored.nbytes

    @property
    def is_dense(self) -> bool:
        """Return False: blocks are quantized."""
        return False

    def rows(self, index: slice) -> BlockMatrix:
        """Return a range of rows, sharing memory or still unread."""
        first, last = bounds(index, self.stored.shape[0])
        return BlockMatrix(self.tensor_type, self.stored[first:last])

    def parts(self, num_rows: int) -> Iterator[BlockMatrix]:
        """Yield the matrix in parts of ``num_rows`` rows; the last may have fewer."""
        for first in range(0, self.stored.shape[0], num_rows):
            yield self.rows(slice(first, first + num_rows))

    def cols(self, index: slice) -> BlockMatrix:
        """Return a range of columns, copied or still unread.

        :raises UnsupportedQuantizationError: the slice cuts a block
        """
        form, (_, cols) = block_format(self.tensor_type), self.shape
        first, last = bounds(index, cols)
        if first % form.elements or last % form.elements:
            raise UnsupportedQuantizationError(
                f"columns {first} to {last} of a {form.name} matrix cut a block of {form.elements} elements",
                quantization=form.name,
            )
        parts = slice(first // form.elements * form.num_bytes, last // form.elements * form.num_bytes)
        if isinstance(self.stored, UnreadRows):
            return BlockMatrix(self.tensor_type, self.stored.cols(parts))
        return BlockMatrix(self.tensor_type, self.stored[:, parts].contiguous())

    def to(self, device: torch.device) -> BlockMatrix:
        """Return the same matrix on a device."""
        return BlockMatrix(self.tensor_type, self.blocks.to(device))

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode the values, [rows, columns]."""
        return dequantize(self.tensor_type, self.blocks, dtype=dtype)


def stacked(matrices: Sequence[BlockMatrix]) -> BlockMatrix | None:
    """Concatenate matrices by rows; return None if they are not all of one type."""
    first = matrices[0]
    if any(matrix.tensor_type != first.tensor_type for matrix in matrices):
        return None
    return BlockMatrix(first.tensor_type, torch.cat([matrix.blocks for matrix in matrices]))

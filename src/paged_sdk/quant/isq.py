"""Quantize matrices in situ: define the format of each ISQ type, and quantize a matrix on its own device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.config.isq import IsqType
from paged_sdk.kernels.native import quantize_groups as native
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.quantize import quantize_blocks
from paged_sdk.kernels.native.structures import WEIGHT_DTYPES
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, BlockMatrix, tensor_type_of
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix, UnreadGroupedMatrix
from paged_sdk.kernels.quantized.quantize import quantize_blocks_reference, weights_at_once
from paged_sdk.kernels.quantized.quantize_groups import (
    FP4_LEVELS,
    NF4_LEVELS,
    quantize_affine,
    quantize_fp8,
    quantize_half_quadratic,
    quantize_levels,
    quantize_rows,
)
from paged_sdk.kernels.quantized.repack import REPACKABLE_TYPES
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix, UnreadRows

__all__ = [
    "blocks_for",
    "blocks_of",
    "can_be_quantized",
    "for_head",
    "has_groups",
    "is_for_gpus",
    "quantize",
    "quantize_stored",
]

_WEIGHTS_AT_ONCE: Final = 1 << 20  # 4 MiB of float32; the embeddings of a large vocabulary would take a gigabyte
_GROUP_COLS: Final = 32  # kernels require a multiple of this many columns


@frozen(kw_only=True)
class _Blocks:
    """Describes an ISQ type that is stored as GGUF blocks.

    :ivar name: ggml's name of the block type
    :ivar narrow: the next wider type, for rows whose length is not a multiple of the block; None: none
    """

    name: str
    narrow: IsqType | None = None

    @property
    def tensor_type(self) -> int:
        return tensor_type_of(self.name)


_BLOCKS: Final[Mapping[IsqType, _Blocks]] = MappingProxyType(
    {
        IsqType.Q2K: _Blocks(name="Q2_K", narrow=IsqType.Q4_0),
        IsqType.Q3K: _Blocks(name="Q3_K", narrow=IsqType.Q4_0),
        IsqType.Q4K: _Blocks(name="Q4_K", narrow=IsqType.Q5_0),
        IsqType.Q5K: _Blocks(name="Q5_K", narrow=IsqType.Q5_1),
        IsqType.Q6K: _Blocks(name="Q6_K", narrow=IsqType.Q8_0),
        IsqType.Q4_0: _Blocks(name="Q4_0"),
        IsqType.Q4_1: _Blocks(name="Q4_1"),
        IsqType.Q5_0: _Blocks(name="Q5_0"),
        IsqType.Q5_1: _Blocks(name="Q5_1"),
        IsqType.Q8_0: _Blocks(name="Q8_0"),
        IsqType.Q8_1: _Blocks(name="Q8_0"),
    }
)


@frozen(kw_only=True)
class _Groups:
    """Describes an ISQ type that is stored as grouped codes.

    :ivar by_torch: quantizes a matrix on any device
    :ivar native: the same on the CPU and many times as fast, called with the library, the matrix and ``num_threads``;
        None: torch is fast enough
    """

    by_torch: Callable[[Tensor], GroupedMatrix]
    native: Callable[..., GroupedMatrix] | None = None


def _half_quadratic(bits: int) -> _Groups:
    return _Groups(
        by_torch=partial(quantize_half_quadratic, bits=bits), native=partial(native.quantize_half_quadratic, bits=bits)
    )


def _affine(bits: int) -> _Groups:
    return _Groups(by_torch=partial(quantize_affine, bits=bits), native=partial(native.quantize_affine, bits=bits))


def _levels(levels: tuple[float, ...]) -> _Groups:
    return _Groups(
        by_torch=partial(quantize_levels, levels=levels), native=partial(native.quantize_levels, levels=levels)
    )


_GROUPS: Final[Mapping[IsqType, _Groups]] = MappingProxyType(
    {
        IsqType.HQQ4: _half_quadratic(4),
        IsqType.HQQ8: _half_quadratic(8),
        IsqType.AFQ2: _affine(2),
        IsqType.AFQ3: _affine(3),
        IsqType.AFQ4: _affine(4),
        IsqType.AFQ6: _affine(6),
        IsqType.AFQ8: _affine(8),
        IsqType.FP8: _Groups(by_torch=quantize_fp8),
        IsqType.INT8: _Groups(by_torch=quantize_rows),
        IsqType.NF4: _levels(NF4_LEVELS),
        IsqType.FP4: _levels(FP4_LEVELS),
    }
)


def blocks_of(isq: IsqType) -> str | None:
    """Return ggml's name of a type's blocks; None: the type has grouped codes."""
    return _BLOCKS[isq].name if isq in _BLOCKS else None


def for_head(isq: IsqType) -> IsqType:
    """Return the type of the output projection and the embeddings in a model that is quantized to ``isq``. Errors of
    the output projection reach the logits undamped.
    """
    return IsqType.Q6K if isq.bits <= 4 else IsqType.Q8_0


def is_for_gpus(isq: IsqType) -> bool:
    """Return whether the GPU kernels can multiply the type."""
    return isq in _BLOCKS and _BLOCKS[isq].tensor_type in REPACKABLE_TYPES


def has_groups(isq: IsqType) -> bool:
    """Return whether a type has grouped codes, not blocks. On the CPU, only the native kernels can multiply these."""
    return isq in _GROUPS


def blocks_for(isq: IsqType, cols: int) -> str | None:
    """Return ggml's name of the blocks used for rows of ``cols`` columns; None: the type has grouped codes, or the rows
    fit no block.
    """
    number = _fitting(isq, cols) if isq in _BLOCKS else None
    return None if number is None else BLOCK_FORMATS[number].name


def can_be_quantized(isq: IsqType, cols: int) -> bool:
    """Return whether rows of ``cols`` columns fit the type or its fallback for narrow rows."""
    return cols % _GROUP_COLS == 0 if isq in _GROUPS else _fitting(isq, cols) is not None


def quantize(
    values: Tensor,
    isq: IsqType,
    library: NativeLibrary | None,
    importance: Tensor | None = None,
    *,
    num_threads: int | None = None,
) -> BlockMatrix | GroupedMatrix:
    """Quantize a matrix on its own device: by the native library on the CPU, else by torch, which is up to a hundred
    times slower. Blocks are bit-identical.

    :param values: ``[rows, columns]`` float32, bfloat16 or float16, for which :func:`can_be_quantized` is true
    :param importance: float32 ``[columns]``, the weight of each column's squared error; None: all 1. Only blocks use it
    :param num_threads: threads of the native library; torch's number by default
    :raises CheckpointError: if the matrix holds NaN, Inf or numbers above 32,768
    """
    if values.device.type != "cpu":
        library = None
    if (groups := _GROUPS.get(isq)) is not None:
        if library is not None and groups.native is not None:
            return groups.native(library, values, num_threads=num_threads)
        return groups.by_torch(values)
    tensor_type = _fitting(isq, values.shape[1])
    assert tensor_type is not None
    if library is not None:
        blocks = quantize_blocks(library, values, tensor_type, importance=importance, num_threads=num_threads)
        return BlockMatrix(tensor_type, blocks)
    return BlockMatrix(tensor_type, quantize_blocks_reference(values, tensor_type, importance))


def quantize_stored(
    matrix: StoredMatrix,
    isq: IsqType,
    library: NativeLibrary | None,
    device: torch.device,
    importance: Tensor | None = None,
    *,
    num_threads: int | None = None,
) -> BlockMatrix | UnreadGroupedMatrix:
    """Quantize a stored matrix on a device lazily, a few rows at a time as they are read, so that neither all values
    nor all codes are in memory at once. Parameters and errors are those of :func:`quantize`; errors are raised when
    rows are read.
    """
    rows, cols = matrix.shape
    step = max(1, weights_at_once(device, on_cpu=_WEIGHTS_AT_ONCE) // max(1, cols))

    def parts(first: int, last: int) -> Iterator[BlockMatrix | GroupedMatrix]:
        for start in range(first, last, step):
            part = matrix.rows(slice(start, min(start + step, last))).to(device)
            yield quantize(_numbers(part), isq, library, importance, num_threads=num_threads)

    if isq in _GROUPS:
        # What all matrices of the type and this width have in common is known without a row of this one.
        like = _GROUPS[isq].by_torch(torch.zeros(1, cols, dtype=torch.float32, device=device))
        return UnreadGroupedMatrix(
            shape=(rows, cols),
            read=lambda first, last: _joined(list(parts(first, last))) if first < last else like.rows(slice(0)),
            group_size=like.group_size,
            has_minima=like.has_minima,
            bits=like.bits,
            levels=like.levels,
        )
    tensor_type = _fitting(isq, cols)
    assert tensor_type is not None
    form = BLOCK_FORMATS[tensor_type]
    row_bytes = cols // form.elements * form.num_bytes

    def read(first: int, last: int) -> Tensor:
        out = torch.empty(last - first, row_bytes, dtype=torch.uint8, device=device)
        done = 0
        for part in parts(first, last):
            assert isinstance(part, BlockMatrix)
            out[done : done + part.shape[0]] = part.blocks
            done += part.shape[0]
        return out

    return BlockMatrix(tensor_type, UnreadRows(shape=(rows, row_bytes), itemsize=1, read=read))


def _numbers(matrix: StoredMatrix) -> Tensor:
    """Return the values in their stored dtype if the quantizers accept it, else in float32."""
    if isinstance(matrix, DenseMatrix) and (weight := matrix.weight).dtype in WEIGHT_DTYPES:
        return weight
    return matrix.decoded()


def _joined(parts: Sequence[BlockMatrix | GroupedMatrix]) -> GroupedMatrix:
    """Concatenate parts of one matrix along the rows."""
    grouped = [part for part in parts if isinstance(part, GroupedMatrix)]
    if len(grouped) == 1:
        return grouped[0]
    minima = [part.minima for part in grouped if part.minima is not None]
    return evolve(
        grouped[0],
        codes=torch.cat([part.codes for part in grouped]),
        scales=torch.cat([part.scales for part in grouped]),
        minima=torch.cat(minima) if minima else None,
    )


def _fitting(isq: IsqType, cols: int) -> int | None:
    """Return ggml's type number of the blocks for rows of ``cols`` columns; None: no type fits."""
    blocks = _BLOCKS[isq]
    if cols % BLOCK_FORMATS[blocks.tensor_type].elements == 0:
        return blocks.tensor_type
    return None if blocks.narrow is None else _fitting(blocks.narrow, cols)

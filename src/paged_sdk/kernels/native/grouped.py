"""Packs grouped matrices into the native kernels' layout.

Codes keep their number of bits: 2, 3, 4, 5, 6 or 8. Scales and minima are stored as float16, with one float32 unit per
row. If a row's minima are integer or half-integer multiples of its scales (zero points), the multiples are stored
instead. Values are kept exactly for float16 and bfloat16 scales and minima that differ by a factor of less than 2**29
within a row, for zero points, and for scales of whole rows. Others are rounded to 11 bits.

Tables of up to 16 levels become int8, times one factor that is chosen for the least squared rounding error. FP4 (MXFP4
and NVFP4) is exact; for normally distributed weights, rounding NF4's levels adds 0.3 % to NF4's own squared error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import byref
from typing import Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.errors import ConfigError, UnsupportedQuantizationError
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.linear import same_order
from paged_sdk.kernels.native.packed import GROUPED_TYPE, PANEL_ROWS, PackedWeight, whole_panels
from paged_sdk.kernels.native.structures_packing import Codes, DecodeGrouped, Grouped
from paged_sdk.kernels.own_pages import own_pages
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix, UnreadGroupedMatrix, even_levels, rounded_levels
from paged_sdk.kernels.quantized.packed_codes import CodeForm, PackedCodes

__all__ = ["can_be_packed", "decode_grouped", "pack_grouped"]

_WIDTH: Final = 32  # columns that the kernels read together
_PART_ELEMENTS: Final = 1 << 19  # packed at once: the codes fit in a core's L2 cache
_MOST_COLS: Final = _WIDTH << 14  # a format number has 14 bits for the columns of a group, in units of _WIDTH
_KIND_OF_BITS: Final = {1: 0, 2: 0, 3: 1, 4: 2, 5: 3, 6: 4, 7: 5, 8: 5}
_LEVELS: Final = 6
_LEVELS_OF_16: Final = 7
_EIGHT_BITS: Final = 5  # codes of this kind are stored minus 128
_STREAM, _HIGH_FIRST, _OF_EIGHT_ROWS = 0, 1, 2  # of ``PagedCodeForm``

_Grouped = GroupedMatrix | UnreadGroupedMatrix


@frozen(eq=False, kw_only=True)
class _Packing:
    """Describes how the matrices of a weight are packed together.

    :ivar kind: one of ``PagedGrouped``
    :ivar group_cols: columns that share a scale, at most those of a row
    :ivar levels: the values of codes; None: codes are integers. Evenly spaced levels are packed without a table, by
        adapting scales and minima
    :ivar scale_factor: multiplies scales: the distance of evenly spaced levels, or undoes the scaling of levels to int8
    :ivar minimum_factor: added to minima, in units of stored scales: the first of evenly spaced levels
    """

    kind: int
    group_cols: int
    levels: Tensor | None = None
    scale_factor: float = 1.0
    minimum_factor: float = 0.0

    def rounded(self) -> _Packing:
        """Return the same with levels as they are packed: rounded to int8, plus 128, as uint8 [16]."""
        if self.levels is None:
            return self
        levels, factor = rounded_levels(self.levels)
        return evolve(self, levels=levels, scale_factor=1.0 / factor)

    @property
    def tensor_type(self) -> int:
        return GROUPED_TYPE | self.kind | -(-self.group_cols // _WIDTH) << 16


def can_be_packed(matrices: Sequence[_Grouped]) -> bool:
    """Return whether matrices can be packed as one, concatenated by rows."""
    return _packing(matrices) is not None


def _packing(matrices: Sequence[_Grouped]) -> _Packing | None:
    """Return how matrices are packed as one, or None if they cannot be."""
    first = matrices[0]
    cols = first.shape[1]
    if cols % _WIDTH or not 0 < cols <= _MOST_COLS or not all(_alike(first, other) for other in matrices):
        return None
    if any(matrix.shape[0] % PANEL_ROWS for matrix in matrices[:-1]) or not all(each.shape[0] for each in matrices):
        return None
    group, bits = min(first.group_size, cols), max(matrix.bits for matrix in matrices)
    whole = group % _WIDTH == 0
    if first.levels is None:
        return _Packing(kind=_KIND_OF_BITS[bits], group_cols=group) if whole else None
    if (line := even_levels(first.levels)) is not None:
        start, step = line
        packing = _Packing(kind=_KIND_OF_BITS[bits], group_cols=group, scale_factor=step, minimum_factor=start / step)
        return packing if whole else None
    if bits > 4 or first.has_minima or not (whole or group == _WIDTH // 2):
        return None
    return _Packing(kind=_LEVELS if whole else _LEVELS_OF_16, group_cols=group, levels=first.levels)


def _alike(one: _Grouped, other: _Grouped) -> bool:
    """Return whether two matrices agree in columns, groups, levels, order, and whether they have minima."""
    same_levels = one.levels is other.levels or (
        one.levels is not None and other.levels is not None and torch.equal(one.levels, other.levels)
    )
    forms = [(each.shape[1], each.group_size, each.has_minima) for each in (one, other)]
    return forms[0] == forms[1] and same_levels and same_order(one.order, other.order)


def pack_grouped(
    library: NativeLibrary,
    matrices: Sequence[_Grouped],
    *,
    num_threads: int | None = None,
    memory: Callable[[int], Tensor] = own_pages,
) -> PackedWeight:
    """Pack matrices as one, concatenated by rows, some rows at a time.

    :param num_threads: torch's own number by default
    :param memory: allocates the given number of bytes for the packed matrix
    :raises UnsupportedQuantizationError: :func:`can_be_packed` is false
    """
    packing, first = _packing(matrices), matrices[0]
    if packing is None:
        name = f"grouped {first.bits}-bit"
        raise UnsupportedQuantizationError(
            f"{name} matrices of {first.shape[1]} columns in groups of {first.group_size} cannot be packed",
            quantization=name,
        )
    rows, cols = sum(matrix.shape[0] for matrix in matrices), first.shape[1]
    functions, tensor_type = library.functions, packing.tensor_type
    data = memory(functions.paged_packed_bytes(tensor_type, rows, cols))
    panels, row = data.view(-(-rows // PANEL_ROWS), -1), 0
    threads = torch.get_num_threads() if num_threads is None else num_threads
    packing = packing.rounded()
    for part in _parts(matrices):
        _pack_part(library, part, packing, panels[row // PANEL_ROWS :], threads)
        row += part.shape[0]
    order = None if first.order is None else first.order.to(torch.int32)
    return PackedWeight(tensor_type=tensor_type, rows=rows, cols=cols, data=data, order=order)


def _parts(matrices: Sequence[_Grouped]) -> Iterator[GroupedMatrix]:
    rows = whole_panels(_PART_ELEMENTS // matrices[0].shape[1])
    for matrix in matrices:
        yield from matrix.parts(rows)


def _pack_part(library: NativeLibrary, part: GroupedMatrix, packing: _Packing, out: Tensor, threads: int) -> None:
    codes, scales = _Codes.of(part), part.scales.contiguous()
    minima = None if part.minima is None else part.minima.contiguous()
    args = Grouped(
        codes=codes.described,
        scales=scales.data_ptr(),
        minima=None if minima is None else minima.data_ptr(),
        levels=None if packing.levels is None else packing.levels.data_ptr(),
        out=out.data_ptr(),
        scale_factor=packing.scale_factor,
        minimum_factor=packing.minimum_factor + (128 if packing.kind == _EIGHT_BITS else 0),
        format=packing.tensor_type,
        rows=part.shape[0],
        cols=part.shape[1],
        num_threads=threads,
    )
    library.functions.paged_pack_grouped(byref(args))


def decode_grouped(library: NativeLibrary, matrix: GroupedMatrix, *, num_threads: int | None = None) -> Tensor:
    """Decode a matrix in CPU memory to float32; see :meth:`GroupedMatrix.decoded`. Columns are a multiple of 32.

    :param num_threads: torch's own number by default
    """
    (rows, cols), codes, scales = matrix.shape, _Codes.of(matrix), matrix.scales.contiguous()
    if cols % _WIDTH:
        raise ConfigError.of("columns of a grouped matrix", cols, f"a multiple of {_WIDTH}")
    minima = None if matrix.minima is None else matrix.minima.contiguous()
    levels = None if matrix.levels is None else matrix.levels.contiguous()
    out = torch.empty(rows, cols, dtype=torch.float32)
    args = DecodeGrouped(
        codes=codes.described,
        scales=scales.data_ptr(),
        minima=None if minima is None else minima.data_ptr(),
        levels=None if levels is None else levels.data_ptr(),
        out=out.data_ptr(),
        group_cols=min(matrix.group_size, cols),
        rows=rows,
        cols=cols,
        num_threads=torch.get_num_threads() if num_threads is None else num_threads,
    )
    library.functions.paged_decode_grouped(byref(args))
    return out if matrix.order is None else torch.empty_like(out).index_copy_(1, matrix.order, out)


@frozen(eq=False)
class _Codes:
    """Describes the memory layout of codes for the native library.

    :ivar words: owns the memory; must outlive the native call
    """

    described: Codes
    words: Tensor

    @classmethod
    def of(cls, matrix: GroupedMatrix) -> _Codes:
        mask = (1 << matrix.bits) - 1  # codes may be stored in more bits, which are ignored
        match matrix.stored:
            case PackedCodes(words=words, form=CodeForm.COLUMNS | CodeForm.OF_EIGHT_ROWS as form, bits=bits):
                words = words if words.stride(1) == 1 else words.contiguous()
                word_bytes = words.stride(0) * words.itemsize
                number = _STREAM if form is CodeForm.COLUMNS else _OF_EIGHT_ROWS
                return cls(_described(words, words.itemsize, bits, number, mask=mask, word_bytes=word_bytes), words)
            case PackedCodes(words=words, form=form, bits=bits):
                words = words.contiguous()
                row_bytes = words.shape[1] * words.itemsize
                number = _HIGH_FIRST if form is CodeForm.HIGH_FIRST else _STREAM
                flip = 128 if form is CodeForm.SIGNED else 0
                return cls(_described(words, row_bytes, bits, number, mask=mask, flip=flip), words)
            case codes:
                words = codes.contiguous()
                return cls(_described(words, words.shape[1], 8, _STREAM, mask=mask), words)


def _described(
    words: Tensor, row_bytes: int, bits: int, form: int, *, mask: int, word_bytes: int = 4, flip: int = 0
) -> Codes:
    return Codes(
        data=words.data_ptr(), row_bytes=row_bytes, word_bytes=word_bytes, bits=bits, form=form, mask=mask, flip=flip
    )

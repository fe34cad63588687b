"""Packs grouped matrices into the native kernels' layout.

Codes keep their bits: 2, 3, 4, 5, 6 or 8. Scales and minima become float16, in units of a float32 number per row; where
a row's minima are whole or half multiples of its scales, as zero points are, these multiples are stored instead. So
scales and minima that were float16 or bfloat16 numbers keep their values as long as those of a row differ by a factor
of less than 2**29, as do zero points and scales of whole rows; others are rounded to 11 bits.

Up to 16 levels become int8 numbers, times the factor for which the squares of the roundings are least. FP4 of MXFP4 and
NVFP4 is exact; NF4's rounding has 0.3 % of the square of NF4's own error for normal weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import byref
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import UnsupportedQuantizationError
from paged_sdk.kernels.grouped_matrix import GroupedMatrix, UnreadGroupedMatrix, even_levels, rounded_levels
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.linear import same_order
from paged_sdk.kernels.native.packed import GROUPED_TYPE, PackedWeight
from paged_sdk.kernels.native.structures import Grouped
from paged_sdk.kernels.own_pages import own_pages

__all__ = ["can_be_packed", "pack_grouped"]

_PANEL_ROWS: Final = 16
_WIDTH: Final = 32  # columns that the kernels read together
_PART_ELEMENTS: Final = 1 << 19  # packed at once: a core's second cache holds their codes
_MOST_COLS: Final = _WIDTH << 14  # the number of a format has 14 bits for the columns of a group
_KIND_OF_BITS: Final = {1: 0, 2: 0, 3: 1, 4: 2, 5: 3, 6: 4, 7: 5, 8: 5}
_LEVELS: Final = 6
_LEVELS_OF_16: Final = 7
_EIGHT_BITS: Final = 5  # codes of this kind are stored less 128

_Grouped = GroupedMatrix | UnreadGroupedMatrix


@frozen(eq=False, kw_only=True)
class _Packing:
    """Says how the matrices of a weight are packed together.

    :ivar kind: one of ``PagedGrouped``
    :ivar group_cols: columns that share a scale, as many as a row has at most
    :ivar levels: uint8 [16], what codes stand for, plus 128; None: themselves
    :ivar scale_factor: what scales are multiplied by
    :ivar minimum_factor: what is added to minima, in scales as they are stored: levels at equal distances are no levels
    """

    kind: int
    group_cols: int
    levels: Tensor | None = None
    scale_factor: float = 1.0
    minimum_factor: float = 0.0

    @property
    def tensor_type(self) -> int:
        return GROUPED_TYPE | self.kind | -(-self.group_cols // _WIDTH) << 16


def can_be_packed(matrices: Sequence[_Grouped]) -> bool:
    """Return whether matrices can be packed one below the other."""
    return _packing(matrices) is not None


def _packing(matrices: Sequence[_Grouped]) -> _Packing | None:
    """Return how matrices are packed one below the other; None: they cannot be."""
    first = matrices[0]
    cols = first.shape[1]
    if cols % _WIDTH or not 0 < cols <= _MOST_COLS or not all(_alike(first, other) for other in matrices):
        return None
    if any(matrix.shape[0] % _PANEL_ROWS for matrix in matrices[:-1]) or not all(each.shape[0] for each in matrices):
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
    levels, factor = rounded_levels(first.levels)
    kind = _LEVELS if whole else _LEVELS_OF_16
    return _Packing(kind=kind, group_cols=group, levels=levels, scale_factor=1.0 / factor)


def _alike(one: _Grouped, other: _Grouped) -> bool:
    """Return whether two matrices differ in rows, scales and minima alone."""
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
    """Pack matrices one below the other, some rows at a time.

    :param num_threads: torch's own number by default
    :param memory: returns so many bytes for the packed matrix
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
    panels, row = data.view(-(-rows // _PANEL_ROWS), -1), 0
    threads = torch.get_num_threads() if num_threads is None else num_threads
    for part in _parts(matrices):
        _pack_part(library, part, packing, panels[row // _PANEL_ROWS :], threads)
        row += part.shape[0]
    order = None if first.order is None else first.order.to(torch.int32)
    return PackedWeight(tensor_type=tensor_type, rows=rows, cols=cols, data=data, order=order)


def _parts(matrices: Sequence[_Grouped]) -> Iterator[GroupedMatrix]:
    rows = max(1, _PART_ELEMENTS // matrices[0].shape[1] // _PANEL_ROWS) * _PANEL_ROWS
    for matrix in matrices:
        yield from matrix.parts(rows)


def _pack_part(library: NativeLibrary, part: GroupedMatrix, packing: _Packing, out: Tensor, threads: int) -> None:
    codes = part.codes.contiguous()
    if part.bits in (1, 7) or (packing.levels is not None and part.bits < 4):
        codes = codes & ((1 << part.bits) - 1)  # the packed form has more bits
    halves, units = _halves(part.scales)
    units *= packing.scale_factor
    minima = minimum_units = None
    if packing.levels is None:
        multiple = packing.minimum_factor + (128 if packing.kind == _EIGHT_BITS else 0)
        minima, minimum_units = _minima(part.scales * packing.scale_factor, part.minima, multiple)
    if packing.kind == _LEVELS_OF_16 and halves.shape[1] % 2:
        halves = torch.nn.functional.pad(halves, (0, 1))
    args = Grouped(
        codes=codes.data_ptr(),
        scales=halves.data_ptr(),
        minima=None if minima is None else minima.data_ptr(),
        units=units.data_ptr(),
        minimum_units=None if minimum_units is None else minimum_units.data_ptr(),
        levels=None if packing.levels is None else packing.levels.data_ptr(),
        out=out.data_ptr(),
        format=packing.tensor_type,
        rows=part.shape[0],
        cols=part.shape[1],
        num_threads=threads,
    )
    library.functions.paged_pack_grouped(byref(args))


def _halves(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers ``[rows, n]`` as float16 and the float32 units of each row, which are above zero.

    A single number is its row's unit; of several, units are powers of two that bring the largest to 2**14 or above.
    """
    largest = numbers.abs().amax(1)
    usable = (largest > 0) & largest.isfinite()
    if numbers.shape[1] == 1:
        units = torch.where(usable, largest, 1.0)
    else:
        exponents = torch.frexp(largest).exponent.clamp(min=-100) - 15
        units = torch.where(usable, torch.ldexp(torch.ones_like(largest), exponents), 1.0)
    return (numbers / units.unsqueeze(1)).half().contiguous(), units.contiguous()


def _minima(scales: Tensor, minima: Tensor | None, multiple: float) -> tuple[Tensor, Tensor]:
    """Return minima plus so many times the scales, as :func:`_halves` does; units of 0 stand for the scales.

    A row has its scales as units where float16 multiples of them are within 2**-16 of a scale.
    """
    if minima is None:
        return torch.full(scales.shape, multiple, dtype=torch.float16), torch.zeros(len(scales))
    multiples = (minima / scales + multiple).nan_to_num(0.0, 0.0, 0.0).half()
    wanted = minima + multiple * scales
    near = (multiples.float() * scales - wanted).abs() <= 2.0**-16 * scales.abs()
    whole = near.all(1)
    halves, units = _halves(wanted)
    return torch.where(whole.unsqueeze(1), multiples, halves).contiguous(), torch.where(whole, 0.0, units)

"""Read HQQ, as hqq and transformers write it: 1, 2, 3, 4 and 8 bits.

Unpacked, a row of ``W_q`` (``axis`` 1) or a column (``axis`` 0) is a group. Packing divides the rows into equal parts
(2 for 4 bits, 4 for 2 bits, and so on) and puts the parts into different bits of the same elements, the first into the
highest bits. ``scale`` and ``zero`` are per group; a weight is ``(code - zero) * scale``.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import ClassVar, Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix, UnreadGroupedMatrix
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix, UnreadRows
from paged_sdk.weights.quantized.format import PackedMatrix, QuantizedFormat, without
from paged_sdk.weights.quantized.packed_tensors import FLOATS, PackedTensors

__all__ = ["FORMAT"]

# By bits: the number of codes per element, and the elements' dtype.
_PACKINGS: Final = {
    1: (8, torch.uint8),
    2: (4, torch.uint8),
    3: (10, torch.int32),
    4: (2, torch.uint8),
    8: (1, torch.uint8),
}
_CODES: Final = ".W_q"
_SETTINGS: Final = (
    ".axis",
    ".channel_wise",
    ".compute_dtype",
    ".encoded_state_dict",
    ".group_size",
    ".nbits",
    ".offload_meta",
    ".optimize",
    ".packing",
    ".quant_scale",
    ".quant_zero",
    ".round_zero",
    ".scale",
    ".shape",
    ".stores_quant_config",
    ".unpack_view_dtype",
    ".view_as_float",
    ".zero",
)


@frozen
class _Layout:
    """Describes the layout of a matrix's codes.

    :ivar shape: rows and columns of the matrix
    :ivar rows: rows of the unpacked codes (``W_q``); ``cols`` likewise
    """

    shape: tuple[int, int]
    bits: int
    group_size: int
    rows: int
    cols: int

    @property
    def packed_rows(self) -> int:
        """Return the number of rows of packed elements."""
        return -(-self.rows // _PACKINGS[self.bits][0])

    @property
    def row_bytes(self) -> int:
        """Return the size of a packed row in bytes."""
        return self.cols * _PACKINGS[self.bits][1].itemsize

    def codes(self, packed: UnreadRows, first: int, last: int) -> Tensor:
        """Read some rows of codes, uint8 ``[rows, cols]``; higher bits of the bytes are not cleared."""
        count, dtype = _PACKINGS[self.bits]
        height = self.packed_rows
        parts = []
        for part in range(first // height, -(-last // height)):
            start = part * height
            elements = packed[max(0, first - start) : min(height, last - start)].tensor().view(dtype)
            shift = (count - 1 - part) * self.bits
            parts.append((elements >> shift if shift else elements).to(torch.uint8))
        if len(parts) == 1:  # the usual case, since few rows are read at once
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, self.cols, dtype=torch.uint8)


@frozen
class _Hqq(QuantizedFormat):
    methods: ClassVar[tuple[str, ...]] = ("hqq",)

    def packs(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        prefix = without(name, _CODES)
        return None if prefix is None else (prefix, f"{prefix}.weight")

    def owner(self, name: str) -> str | None:
        return without(name, *_SETTINGS)

    def matrix(self, tensors: PackedTensors) -> PackedMatrix:
        bits, group_size, axis = (tensors.number(suffix) for suffix in (".nbits", ".group_size", ".axis"))
        rows, cols = tensors.tensor(".shape", (torch.int32, torch.int64), (2,)).tolist()
        if bits not in _PACKINGS or axis not in (0, 1):
            raise tensors.error(_CODES, f"has {bits} bits along axis {axis}: expected 1, 2, 3, 4 or 8 along 0 or 1")
        if min(rows, cols, group_size) < 1 or rows * cols % group_size:
            raise tensors.error(".group_size", f"is {group_size} for a matrix of {[rows, cols]}")
        for suffix in (".quant_scale", ".quant_zero"):
            if suffix in tensors and tensors.number(suffix):
                raise tensors.error(suffix, "says that scales or zero points are quantized, which is not supported")
        groups = rows * cols // group_size
        of_groups = (groups, 1) if axis else (1, groups)
        for suffix in (".scale", ".zero"):
            tensors.check(suffix, FLOATS, of_groups)
        layout = _Layout((rows, cols), bits, group_size, *((groups, group_size) if axis else (group_size, groups)))
        if bits != 3 and layout.rows % _PACKINGS[bits][0]:
            raise tensors.error(_CODES, f"packs {layout.rows} rows, {_PACKINGS[bits][0]} into one")
        packed = tensors.unread_bytes(_CODES, layout.packed_rows, layout.row_bytes)
        whole_groups = axis == 1 and cols % group_size == 0
        return PackedMatrix((rows, cols), partial(_grouped if whole_groups else _decoded, tensors, layout, packed))


def _grouped(tensors: PackedTensors, layout: _Layout, packed: UnreadRows) -> StoredMatrix:
    rows, cols = layout.shape
    per_row = cols // layout.group_size
    scales = tensors.floats(".scale").view(rows, per_row)
    minima = -scales * tensors.floats(".zero").view(rows, per_row)

    def read(first: int, last: int) -> GroupedMatrix:
        return GroupedMatrix(
            codes=layout.codes(packed, first * per_row, last * per_row).view(last - first, cols),
            scales=scales[first:last],
            minima=minima[first:last],
            group_size=layout.group_size,
            bits=layout.bits,
        )

    return UnreadGroupedMatrix(
        shape=layout.shape, read=read, group_size=layout.group_size, has_minima=True, bits=layout.bits
    )


def _decoded(tensors: PackedTensors, layout: _Layout, packed: UnreadRows) -> StoredMatrix:
    """Return a decoded matrix, for groups that are not within a row."""
    whole = _Whole(tensors, layout, packed)
    return DenseMatrix(
        UnreadRows(shape=layout.shape, itemsize=4, read=lambda first, last: whole.values[first:last].clone())
    )


class _Whole:
    """Decodes a whole matrix on first access."""

    def __init__(self, tensors: PackedTensors, layout: _Layout, packed: UnreadRows) -> None:
        self._tensors = tensors
        self._layout = layout
        self._packed = packed

    @cached_property
    def values(self) -> Tensor:
        """Return the values, float32."""
        codes = (self._layout.codes(self._packed, 0, self._layout.rows) & (1 << self._layout.bits) - 1).float()
        codes -= self._tensors.floats(".zero")
        codes *= self._tensors.floats(".scale")
        return codes.view(self._layout.shape)


FORMAT: Final = _Hqq

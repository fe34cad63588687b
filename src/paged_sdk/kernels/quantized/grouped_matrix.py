"""Defines matrices of small codes with a scale, and optionally a minimum, for each group of columns of a row.

GPTQ, AWQ, HQQ, MLX's affine weights, bitsandbytes' NF4, FP4 and int8, MXFP4, NVFP4 and FP8 are all such matrices. The
reader of a format converts codes to bytes, scales to float32 and zero points to minima, so kernels need not know the
format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
from attrs import Factory, evolve, field, frozen
from torch import Tensor

from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError
from paged_sdk.kernels.quantized.packed_codes import PackedCodes
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix, bounds

__all__ = ["GroupedMatrix", "UnreadGroupedMatrix", "even_levels", "every_other_row", "rounded_levels"]

_ELEMENTS_AT_ONCE: Final = 1 << 20  # decoded at once, so that temporaries take some 12 MiB


def _bits_of(matrix: GroupedMatrix) -> int:
    """Return the bits of an index into the levels, or without levels those of the largest code."""
    if matrix.levels is not None:
        return max(1, (matrix.levels.numel() - 1).bit_length())
    codes = matrix.codes
    return max(1, int(codes.max()).bit_length()) if codes.numel() else 1


@frozen(eq=False, kw_only=True)
class GroupedMatrix:
    """Holds a matrix in groups; it is a :class:`~paged_sdk.kernels.quantized.stored_matrix.StoredMatrix`.

    ``value[r, order[c]] = scales[r, c // group_size] * number + minima[r, c // group_size]``, in float32, where the
    number is ``codes[r, c]``, or ``levels[codes[r, c]]`` if there are levels.

    :ivar stored: the codes, given as ``codes``: uint8 ``[rows, cols]``, or packed as in a file
    :ivar scales: float32 ``[rows, groups]``; a row's last group may have fewer columns
    :ivar minima: like ``scales``; None: all are zero
    :ivar group_size: number of consecutive columns that share a scale; may be larger than a row
    :ivar levels: float32 ``[2 ** bits]``, the values of codes; None: codes are the numbers
    :ivar order: int64 ``[cols]``: the input column that each stored column multiplies; None: the columns are in order
    :ivar bits: bits per code. By default derived from levels or codes; if given, higher bits of codes are ignored
    :raises CheckpointError: parts do not fit each other
    """

    stored: Tensor | PackedCodes = field(alias="codes")
    scales: Tensor
    minima: Tensor | None = None
    group_size: int
    levels: Tensor | None = None
    order: Tensor | None = None
    bits: int = Factory(_bits_of, takes_self=True)

    def __attrs_post_init__(self) -> None:
        if isinstance(self.stored, Tensor) and self.stored.dim() != 2:
            raise _misfit("codes", self.stored, "two dimensions")
        if self.group_size < 1:
            raise CheckpointError(f"a group of weights has {self.group_size} columns: at least 1 is possible")
        rows, cols = self.stored.shape
        groups = (rows, -(-cols // self.group_size))
        if isinstance(self.stored, Tensor):
            _check("codes", self.stored, torch.uint8, (rows, cols))
        _check("scales", self.scales, torch.float32, groups)
        if self.minima is not None:
            _check("minima", self.minima, torch.float32, groups)
        if not 1 <= self.bits <= 8:
            raise CheckpointError(f"codes of a matrix have {self.bits} bits: 1 to 8 are possible")
        if self.levels is not None:
            _check("levels", self.levels, torch.float32, (1 << self.bits,))
        if self.order is not None:
            _check("order", self.order, torch.int64, (cols,))
            _check_order(self.order)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and columns."""
        rows, cols = self.stored.shape
        return rows, cols

    @property
    def codes(self) -> Tensor:
        """Return the codes, uint8 ``[rows, cols]``, unpacking them if necessary."""
        return self.stored if isinstance(self.stored, Tensor) else self.stored.bytes()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the matrix if codes are packed to their bits, and scales and minima take 16 bits."""
        rows, cols = self.stored.shape
        return rows * (-(-cols * self.bits // 8) + 2 * self.scales.shape[1] * (1 + self.has_minima))

    @property
    def is_dense(self) -> bool:
        """Return False: it is quantized."""
        return False

    @property
    def has_minima(self) -> bool:
        """Return whether groups have minima."""
        return self.minima is not None

    def rows(self, index: slice) -> GroupedMatrix:
        """Return a range of rows, sharing memory."""
        part = slice(*bounds(index, self.shape[0]))
        minima = None if self.minima is None else self.minima[part]
        codes = self.stored[part] if isinstance(self.stored, Tensor) else self.stored.rows(part)
        return evolve(self, codes=codes, scales=self.scales[part], minima=minima)

    def parts(self, num_rows: int) -> Iterator[GroupedMatrix]:
        """Yield the matrix in parts of ``num_rows`` rows; the last may have fewer."""
        for first in range(0, self.shape[0], num_rows):
            yield self.rows(slice(first, first + num_rows))

    def cols(self, index: slice) -> GroupedMatrix:
        """Return a range of columns, sharing memory.

        :raises UnsupportedQuantizationError: the slice cuts a group, or columns are reordered
        """
        cols = self.shape[1]
        first, last = bounds(index, cols)
        if (first, last) == (0, cols):
            return self
        if self.order is not None:
            raise _uncut(self, first, last, "are not in the order of the input")
        if first % self.group_size or (last % self.group_size and last != cols):
            raise _uncut(self, first, last, f"cut a group of {self.group_size}")
        part = slice(first // self.group_size, -(-last // self.group_size))
        minima = None if self.minima is None else self.minima[:, part]
        return evolve(self, codes=self.codes[:, first:last], scales=self.scales[:, part], minima=minima)

    def to(self, device: torch.device) -> GroupedMatrix:
        """Return the same matrix on a device, itself if it is there already."""
        if self.stored.device == device:
            return self
        return evolve(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            minima=None if self.minima is None else self.minima.to(device),
            levels=None if self.levels is None else self.levels.to(device),
            order=None if self.order is None else self.order.to(device),
        )

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode the values, ``[rows, columns]``, some rows at a time."""
        rows, cols = self.shape
        out, codes = torch.empty(rows, cols, dtype=dtype, device=self.stored.device), self.codes
        at_once = max(1, _ELEMENTS_AT_ONCE // max(1, cols))
        for first in range(0, rows, at_once):
            part = slice(first, first + at_once)
            if self.order is None:
                out[part] = self._values(codes[part], part)
            else:
                out[part, self.order] = self._values(codes[part], part).to(dtype)
        return out

    def _values(self, codes: Tensor, part: slice) -> Tensor:
        if self.bits < 8:
            codes = codes & ((1 << self.bits) - 1)
        numbers = codes.float() if self.levels is None else self.levels[codes.int()]
        numbers *= self._of_columns(self.scales[part])
        return numbers if self.minima is None else numbers.add_(self._of_columns(self.minima[part]))

    def _of_columns(self, of_groups: Tensor) -> Tensor:
        """Repeat each group's number for all columns of the group."""
        cols = self.shape[1]
        if of_groups.shape[1] == 1:
            return of_groups
        return of_groups.repeat_interleave(self.group_size, dim=1)[:, :cols]


@frozen(eq=False, kw_only=True)
class UnreadGroupedMatrix:
    """Represents a grouped matrix in a file, whose rows are read on each access.

    It is a :class:`~paged_sdk.kernels.quantized.stored_matrix.StoredMatrix` too. Packing takes it in :meth:`parts`, so
    that only a few rows' codes are in memory as bytes at a time.

    :ivar shape: rows and columns
    :ivar read: returns the rows from a first to a last (exclusive), always with the same ``group_size``, ``levels``,
        ``order``, ``bits`` and ``has_minima``
    :ivar group_size: see :class:`GroupedMatrix`; ``levels``, ``order`` and ``bits`` likewise
    :ivar has_minima: whether groups have minima
    :ivar first: offset of the matrix's first row, added to row numbers passed to ``read``
    """

    shape: tuple[int, int]
    read: Callable[[int, int], GroupedMatrix]
    group_size: int
    has_minima: bool
    bits: int
    levels: Tensor | None = None
    order: Tensor | None = None
    first: int = 0

    @property
    def num_bytes(self) -> int:
        """See :attr:`GroupedMatrix.num_bytes`."""
        rows, cols = self.shape
        groups = -(-cols // self.group_size)
        return rows * (-(-cols * self.bits // 8) + 2 * groups * (1 + self.has_minima))

    @property
    def is_dense(self) -> bool:
        """Return False: it is quantized."""
        return False

    def matrix(self) -> GroupedMatrix:
        """Read all rows.

        :raises CheckpointError: shape, group size, bits or minima differ from those announced
        """
        found = self.read(self.first, self.first + self.shape[0])
        announced = (self.shape, self.group_size, self.bits, self.has_minima)
        if (found.shape, found.group_size, found.bits, found.has_minima) != announced:
            raise CheckpointError(
                f"a matrix of (shape, columns of a group, bits, minima) {announced} was read as "
                f"{(found.shape, found.group_size, found.bits, found.has_minima)}"
            )
        return found

    def rows(self, index: slice) -> UnreadGroupedMatrix:
        """Return a range of rows, still unread."""
        first, last = bounds(index, self.shape[0])
        return evolve(self, shape=(last - first, self.shape[1]), first=self.first + first)

    def parts(self, num_rows: int) -> Iterator[GroupedMatrix]:
        """Read and yield the matrix in parts of ``num_rows`` rows; the last may have fewer."""
        for first in range(0, self.shape[0], num_rows):
            yield self.rows(slice(first, first + num_rows)).matrix()

    def cols(self, index: slice) -> GroupedMatrix:
        """See :meth:`GroupedMatrix.cols`; the whole matrix is read."""
        return self.matrix().cols(index)

    def to(self, device: torch.device) -> GroupedMatrix:
        """Read the matrix, and copy it to a device."""
        return self.matrix().to(device)

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Read and decode the values, ``[rows, columns]``, some rows at a time."""
        rows, cols = self.shape
        out = torch.empty(rows, cols, dtype=dtype)
        first = 0
        for part in self.parts(max(1, _ELEMENTS_AT_ONCE // max(1, cols))):
            out[first : first + part.shape[0]] = part.decoded(dtype)
            first += part.shape[0]
        return out


def every_other_row(matrix: StoredMatrix, first: int) -> StoredMatrix:
    """Return a copy of every second row of a matrix, from row ``first`` on. Grouped matrices stay grouped; others
    become dense.
    """
    if isinstance(matrix, UnreadGroupedMatrix):
        matrix = matrix.matrix()
    if not isinstance(matrix, GroupedMatrix):
        values = matrix.weight if isinstance(matrix, DenseMatrix) else matrix.decoded()
        return DenseMatrix(values[first::2].contiguous())
    rows = slice(first, None, 2)
    return evolve(
        matrix,
        codes=matrix.codes[rows].contiguous(),
        scales=matrix.scales[rows].contiguous(),
        minima=None if matrix.minima is None else matrix.minima[rows].contiguous(),
    )


def even_levels(levels: Tensor) -> tuple[float, float] | None:
    """Return the first level and the distance between levels, or None if they are not evenly spaced."""
    start, step = float(levels[0]), float(levels[1] - levels[0])
    even = start + step * torch.arange(len(levels), dtype=torch.float64, device=levels.device)
    return (start, step) if step != 0 and torch.equal(even.float(), levels) else None


def rounded_levels(levels: Tensor) -> tuple[Tensor, float]:
    """Round levels times a factor to int8; return these plus 128, uint8 [16], and the factor."""
    numbers = torch.zeros(16, dtype=torch.float64)
    device = levels.device
    numbers[: len(levels)] = levels.double().cpu()
    largest = float(numbers.abs().max())
    if not 0 < largest < float("inf"):
        return torch.full((16,), 128, dtype=torch.uint8, device=device), 1.0
    # Factors for which the largest level becomes 64 to 127, in steps of 1/16; the one with the least error is chosen.
    codes = torch.round(
        torch.arange(127 * 16, 64 * 16 - 1, -1, dtype=torch.float64).unsqueeze(1) / 16 * (numbers / largest)
    )
    factors = (codes * numbers).sum(1) / numbers.square().sum()
    best = int((codes / factors.unsqueeze(1) - numbers).square().sum(1).argmin())
    return (codes[best] + 128).to(device, torch.uint8), float(factors[best])


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape:
        raise _misfit(name, tensor, f"{dtype} {list(shape)}")


def _check_order(order: Tensor) -> None:
    """Check that an order is a permutation."""
    if order.is_meta or not order.numel():
        return
    lowest, highest = order.aminmax()
    cols = order.numel()
    if int(lowest) < 0 or int(highest) >= cols or int(torch.bincount(order, minlength=cols).max()) > 1:
        raise CheckpointError(f"the order of a matrix's {cols} columns does not name each of them once")


def _misfit(name: str, tensor: Tensor, expected: str) -> CheckpointError:
    return CheckpointError(f"{name} of a grouped matrix are {tensor.dtype} {list(tensor.shape)}: expected {expected}")


def _uncut(matrix: GroupedMatrix, first: int, last: int, why: str) -> UnsupportedQuantizationError:
    name = f"grouped {matrix.bits}-bit"
    return UnsupportedQuantizationError(f"columns {first} to {last} of a {name} matrix {why}", quantization=name)

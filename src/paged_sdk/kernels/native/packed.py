"""Packs weights into the native kernels' layout: panels of 16 rows, of GGUF blocks or dense numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import addressof, byref
from types import MappingProxyType
from typing import Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.errors import CheckpointError, ConfigError, UnsupportedQuantizationError
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.structures import WEIGHT_DTYPES, Rows, Weight
from paged_sdk.kernels.native.structures_packing import Dense
from paged_sdk.kernels.own_pages import own_pages
from paged_sdk.kernels.quantized.gguf_blocks import block_format

__all__ = [
    "DENSE_TYPES",
    "GROUPED_TYPE",
    "PACKED_TYPES",
    "PANEL_ROWS",
    "PackedWeight",
    "decode_rows",
    "gains_in_hadamard",
    "pack_dense",
    "pack_gguf",
    "unpack_rows",
    "whole_panels",
]

#: ggml's numbers of the tensor types that can be packed: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K
PACKED_TYPES = frozenset({2, 3, 6, 7, 8, 10, 11, 12, 13, 14})

#: Maps the dtype of a dense matrix to the library's number for it.
DENSE_TYPES: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 257, torch.bfloat16: 258, torch.float16: 259})

GROUPED_TYPE: Final = 4096
"""Bit that is set in the type numbers of packed grouped matrices, and in no other type number."""

PANEL_ROWS: Final = 16
"""Number of rows in a panel."""


@frozen(eq=False)
class PackedWeight:
    """Holds a matrix [rows, cols] that the native kernels multiply with; it owns its memory.

    :ivar tensor_type: ggml's number of the block format, or one of :data:`DENSE_TYPES`, or a number of ``PagedGrouped``
    :ivar rows: output features
    :ivar cols: input features: a multiple of the format's block; any number if dense
    :ivar data: uint8, in the layout of ``csrc/layout.h``, the same on every instruction set
    :ivar in_hadamard: how blocks are multiplied: False: as they are, which is faster for few rows; True: as int8
        codes of their Hadamard transform, made during the product (``csrc/hadamard_product.h``)
    :ivar order: int32 ``[cols]``: the input column that each column multiplies; None: the columns are in order
    """

    tensor_type: int
    rows: int
    cols: int
    data: Tensor
    in_hadamard: bool = False
    order: Tensor | None = None

    @property
    def dense_dtype(self) -> torch.dtype | None:
        """Return the dtype of a dense matrix, or None if the weights are quantized."""
        return next((dtype for dtype, number in DENSE_TYPES.items() if number == self.tensor_type), None)

    @property
    def format(self) -> str:
        """Return ggml's name of the block format, or the name of a dense matrix's dtype, or "grouped"."""
        if self.dense_dtype is not None:
            return str(self.dense_dtype).removeprefix("torch.")
        return "grouped" if self.tensor_type & GROUPED_TYPE else block_format(self.tensor_type).name

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the packed matrix, whose rows are padded to a multiple of 16."""
        return self.data.numel()

    def hadamard_form(self) -> PackedWeight:
        """Return the same matrix, in the same memory, to be multiplied by codes of its Hadamard transform.

        :raises ConfigError: the matrix is dense
        """
        if self.dense_dtype is not None:
            raise ConfigError.of("weight", self.format, "a matrix in blocks")
        return evolve(self, in_hadamard=True)


def gains_in_hadamard(library: NativeLibrary, weights: Sequence[PackedWeight]) -> bool:
    """Return whether the Hadamard form makes products with many rows faster, for matrices in blocks with one input. The
    majority of their rows decides: on AVX2 without VNNI, only 8-bit formats gain.
    """
    gains = library.functions.paged_gains_in_hadamard
    gaining = sum(weight.rows for weight in weights if gains(library.level, weight.tensor_type))
    return 2 * gaining > sum(weight.rows for weight in weights)


def whole_panels(rows: int) -> int:
    """Round down to whole panels, at least one, so that parts of a matrix can be packed one after another."""
    return max(1, rows // PANEL_ROWS) * PANEL_ROWS


def pack_gguf(
    library: NativeLibrary,
    raw: Tensor | Iterable[Tensor],
    tensor_type: int,
    rows: int,
    cols: int,
    *,
    num_threads: int | None = None,
    memory: Callable[[int], Tensor] = own_pages,
) -> PackedWeight:
    """Repack a GGUF tensor without loss.

    :param raw: uint8 [rows, bytes of a row] (or flat), the file's blocks; or consecutive parts of them, all but the
        last with a multiple of 16 rows. Each part is released before the next is taken
    :param tensor_type: ggml's number of the type
    :param num_threads: torch's own number by default
    :param memory: allocates the given number of bytes for the packed matrix
    :raises UnsupportedQuantizationError: the type is not one of :data:`PACKED_TYPES`
    :raises CheckpointError: ``cols`` is no multiple of the format's block, or ``raw`` is not rows x cols elements
    """
    form = block_format(tensor_type)
    if tensor_type not in PACKED_TYPES:
        supported = tuple(block_format(number).name for number in sorted(PACKED_TYPES))
        raise UnsupportedQuantizationError(
            f"{form.name} weights cannot be packed for the native kernels: supported are {', '.join(supported)}",
            quantization=form.name,
            supported=supported,
        )
    if rows < 1 or cols < 1 or cols % form.elements:
        raise CheckpointError(
            f"a {form.name} tensor of {rows} x {cols} cannot be: its rows are blocks of {form.elements} elements"
        )
    row_bytes = cols // form.elements * form.num_bytes
    functions = library.functions
    data = memory(functions.paged_packed_bytes(tensor_type, rows, cols))
    threads = torch.get_num_threads() if num_threads is None else num_threads
    panels, first = data.view(-(-rows // PANEL_ROWS), -1), 0
    for part in [raw] if isinstance(raw, Tensor) else raw:
        count, rest = divmod(part.numel(), row_bytes)
        if part.dtype != torch.uint8 or rest or first % PANEL_ROWS or first + count > rows:
            raise _other_size(form.name, rows, cols, row_bytes, first * row_bytes + part.numel(), part.dtype)
        blocks, out = part.contiguous(), panels[first // PANEL_ROWS :]
        functions.paged_pack(tensor_type, blocks.data_ptr(), count, cols, out.data_ptr(), threads)
        first += count
    if first != rows:
        raise _other_size(form.name, rows, cols, row_bytes, first * row_bytes, torch.uint8)
    return PackedWeight(tensor_type=tensor_type, rows=rows, cols=cols, data=data)


def _other_size(name: str, rows: int, cols: int, row_bytes: int, found: int, dtype: torch.dtype) -> CheckpointError:
    return CheckpointError(
        f"a {name} tensor of {rows} x {cols} has {rows * row_bytes} bytes: got {found} elements of {dtype}"
    )


def pack_dense(
    library: NativeLibrary,
    parts: Iterable[Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    num_threads: int | None = None,
    memory: Callable[[int], Tensor] = own_pages,
) -> PackedWeight:
    """Pack a dense matrix.

    :param parts: ``[rows, cols]`` in CPU memory: the matrix, or consecutive parts of it, all but the last with a
        multiple of 16 rows. Each part is released before the next is taken
    :param shape: rows and columns of the whole matrix
    :param dtype: of the packed matrix, one of :data:`DENSE_TYPES`; parts may have any of these, and are rounded
    :param num_threads: torch's own number by default
    :param memory: allocates the given number of bytes for the packed matrix
    :raises ConfigError: a part does not fit, or the dtype has no kernel
    """
    if dtype not in DENSE_TYPES:
        raise ConfigError.of("weight.dtype", dtype, " or ".join(map(str, DENSE_TYPES)))
    (rows, cols), functions = shape, library.functions
    data = memory(functions.paged_packed_bytes(DENSE_TYPES[dtype], rows, cols))
    threads = torch.get_num_threads() if num_threads is None else num_threads
    panels, first = data.view(-(-rows // PANEL_ROWS), -1), 0
    for part in parts:
        fits = part.shape[1:] == (cols,) and first + len(part) <= rows and first % PANEL_ROWS == 0
        if not fits or part.dtype not in DENSE_TYPES or part.device.type != "cpu":
            dtypes = " or ".join(map(str, DENSE_TYPES))
            due = f"{dtypes} [a multiple of {PANEL_ROWS}, {cols}] in CPU memory, {rows} rows in all"
            raise ConfigError.of("part of a weight", f"{part.dtype} {tuple(part.shape)}", due)
        values, out = part.contiguous(), panels[first // PANEL_ROWS :]
        args = Dense(
            x=values.data_ptr(),
            out=out.data_ptr(),
            format=DENSE_TYPES[dtype],
            rows=len(part),
            cols=cols,
            dtype=WEIGHT_DTYPES[part.dtype],
            num_threads=threads,
        )
        functions.paged_pack_dense(library.level, byref(args))
        first += len(part)
    if first != rows:
        raise ConfigError.of("rows of all parts", first, str(rows))
    return PackedWeight(tensor_type=DENSE_TYPES[dtype], rows=rows, cols=cols, data=data)


def decode_rows(
    library: NativeLibrary, weight: PackedWeight, rows: Tensor, *, num_threads: int | None = None
) -> Tensor:
    """Decode selected rows of a matrix. Numbers of GGUF blocks are exactly those that the file's format defines.

    :param rows: int64 ``[num_rows]``
    :param num_threads: torch's own number by default
    :returns: a new float32 tensor ``[num_rows, weight.cols]``
    :raises IndexError: a row does not exist
    """
    rows, out = rows.contiguous(), torch.empty(len(rows), weight.cols, dtype=torch.float32)
    stored = Weight(data=weight.data.data_ptr(), format=weight.tensor_type, rows=weight.rows, cols=weight.cols)
    threads = torch.get_num_threads() if num_threads is None else num_threads
    args = Rows(
        weight=addressof(stored), rows=rows.data_ptr(), out=out.data_ptr(), num_rows=len(rows), num_threads=threads
    )
    if library.functions.paged_rows(library.level, byref(args)):
        raise IndexError(f"rows {rows.tolist()[:10]} are not all below {weight.rows}")
    if weight.order is None:
        return out
    return torch.empty_like(out).index_copy_(1, weight.order.long(), out)


def unpack_rows(weight: PackedWeight, rows: Tensor) -> Tensor:
    """Return selected rows of a dense matrix, unpacked.

    :param rows: int64 ``[num_rows]``, each below ``weight.rows``
    :returns: a new tensor ``[num_rows, weight.cols]`` of the matrix's dtype
    """
    dtype = weight.dense_dtype
    assert dtype is not None, weight.format
    numbers = weight.data.view(dtype).view(-(-weight.rows // PANEL_ROWS), -1)
    panel, lane = rows // PANEL_ROWS, rows % PANEL_ROWS
    if dtype == torch.bfloat16:
        found = numbers.view(len(numbers), -1, PANEL_ROWS, 2)[panel, :, lane]  # [num_rows, pairs, 2]
    else:
        found = numbers.view(len(numbers), -1, PANEL_ROWS)[panel, :, lane]
    return found.flatten(1)[:, : weight.cols].contiguous()

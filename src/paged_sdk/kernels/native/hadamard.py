"""Makes the Hadamard form of weights, with which the native kernels multiply many rows: int8 with one scale per row.

The same Hadamard transform of weights and activations leaves their product as it is and spreads large channels, so that
one scale per row loses little (:mod:`paged_sdk.kernels.hadamard`).
"""

from __future__ import annotations

from ctypes import addressof, byref
from typing import Final

import torch

from paged_sdk.errors import CheckpointError, ConfigError
from paged_sdk.kernels.gguf_blocks import BlockMatrix
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.linear import describe
from paged_sdk.kernels.native.packed import HADAMARD_INT8, PackedWeight
from paged_sdk.kernels.native.structures import Hadamard, Weight

__all__ = ["hadamard_from_blocks", "hadamard_from_packed"]

# So many rows are decoded at once: 16 MB of a matrix with 4,096 columns. It is a multiple of a panel's 16 rows.
_ROWS_AT_ONCE: Final = 1024


def hadamard_from_packed(
    library: NativeLibrary, weight: PackedWeight, *, num_threads: int | None = None
) -> PackedWeight:
    """Make the Hadamard form of a packed matrix.

    :param num_threads: torch's own number by default
    :raises ConfigError: it is in the Hadamard form already
    """
    if weight.tensor_type == HADAMARD_INT8:
        raise ConfigError.of("weight", weight.format, "a packed one")
    source = Weight()
    describe(source, weight, None)
    rotated = _empty(library, weight.rows, weight.cols)
    args = Hadamard(packed=addressof(source), out=rotated.data.data_ptr(), rows=weight.rows, cols=weight.cols)
    _run(library, args, num_threads)
    return rotated


def hadamard_from_blocks(
    library: NativeLibrary, matrix: BlockMatrix, *, num_threads: int | None = None
) -> PackedWeight:
    """Make the Hadamard form of a matrix in blocks of any format.

    :param num_threads: torch's own number by default
    :raises CheckpointError: its rows are no multiple of 32 columns
    """
    rows, cols = matrix.shape
    if cols % 32:
        raise CheckpointError(f"a matrix of {rows} x {cols} cannot be rotated: columns must be a multiple of 32")
    rotated = _empty(library, rows, cols)
    panels = rotated.data.view(-(-rows // 16), -1)
    for first, blocks in zip(range(0, rows, _ROWS_AT_ONCE), torch.split(matrix.blocks, _ROWS_AT_ONCE), strict=True):
        values = BlockMatrix(matrix.tensor_type, blocks).decoded()
        args = Hadamard(
            x=values.data_ptr(),
            x_stride=values.stride(0),
            out=panels[first // 16 :].data_ptr(),
            rows=len(values),
            cols=cols,
        )
        _run(library, args, num_threads)
    return rotated


def _empty(library: NativeLibrary, rows: int, cols: int) -> PackedWeight:
    data = torch.empty(library.functions.paged_packed_bytes(HADAMARD_INT8, rows, cols), dtype=torch.uint8)
    return PackedWeight(tensor_type=HADAMARD_INT8, rows=rows, cols=cols, data=data)


def _run(library: NativeLibrary, args: Hadamard, num_threads: int | None) -> None:
    args.num_threads = torch.get_num_threads() if num_threads is None else num_threads
    if library.functions.paged_hadamard(library.level, byref(args)):
        raise MemoryError("no memory for rotating a weight")

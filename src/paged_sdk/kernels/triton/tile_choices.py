"""Holds how products with repacked matrices are cut, by device and by rows of activations: one table to be set by a
sweep (``python -m benchmarks.gpu --only sweep``).

Until a device has been swept, choices follow from the compiled code: the fewest instructions for each weight whose
registers do not spill and whose shared memory leaves room for a second program (``python -m
benchmarks.instruction_counts``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Final

import torch
from attrs import evolve, frozen

__all__ = [
    "DECODE_ALL_ROWS",
    "EXPERT_TILE_CHOICES",
    "MAX_FEW_ROWS",
    "TILE_CHOICES",
    "MatrixUnits",
    "TileChoice",
    "matrix_units",
    "tile_choice",
]

MAX_FEW_ROWS: Final = 1
"""Up to so many rows of activations, threads add up products, and from the next on matrix instructions do.

Compiled for compute capability 9.0, threads take 4.6 instructions for each weight of Q4_K with one row, 6.8 with two
and 11.7 with four; matrix instructions take 3.6 with up to 16. There is time for 3.6 to 5.5
(:mod:`~paged_sdk.kernels.triton.quantized_row_sums`).
"""

DECODE_ALL_ROWS: Final = 512
"""From so many rows of activations on, the matrix is decoded to memory first: 2 bytes a weight are written and read.

By what is moved, an H100 decodes 14,336 x 4096 weights of Q4_K in 45 us; cuBLAS multiplies 256 rows by them in 38 us. A
tile of 256 rows has 10 us of decoding instead. If its products reach 60 % of cuBLAS's rate, both ways are on a par
between 256 and 512 rows.
"""


class MatrixUnits(Enum):
    """Names what multiplies tiles."""

    THREADS = "threads"
    """float32 numbers take no matrix instructions."""

    REGISTERS = "registers"
    """Matrix instructions of 16 rows take both factors from registers."""

    SHARED_MEMORY = "shared memory"
    """There are also those of 64 rows, which take factors from shared memory (Hopper and data-center Blackwell)."""


@frozen
class TileChoice:
    """Says how large tiles are for some numbers of rows of activations.

    :ivar block_m: rows of activations to a program; the choice is for so many rows, and fewer
    :ivar block_n: rows of the matrix to a program
    :ivar block_w: words of each that are decoded at once
    :ivar num_warps: warps of a program
    :ivar num_stages: tiles on their way at once
    :ivar deep: whether all fields of the words are one product
    :ivar programs: how many are wanted for each multiprocessor: while memory sets the pace, those that share one have
        more loads in flight; later they would only make more sums to join
    """

    block_m: int
    block_n: int
    block_w: int
    num_warps: int
    num_stages: int
    deep: bool = False
    programs: int = 1


# Two warps, because with four Triton would take matrix instructions of 64 rows on Hopper: for so few rows of
# activations they take more instructions around them. What more stages or rows need would not fit the 99 KiB of shared
# memory of smaller GPUs.
_UP_TO_32: Final = (
    TileChoice(block_m=16, block_n=64, block_w=32, num_warps=2, num_stages=3, programs=4),
    TileChoice(block_m=32, block_n=64, block_w=32, num_warps=2, num_stages=3, programs=4),
)

_EXPERTS_UP_TO_32: Final = (_UP_TO_32[0], evolve(_UP_TO_32[1], block_w=16))
_THREADS: Final = (
    TileChoice(block_m=16, block_n=64, block_w=32, num_warps=4, num_stages=2, programs=4),
    TileChoice(block_m=32, block_n=64, block_w=32, num_warps=4, num_stages=2, programs=4),
)
_REGISTERS: Final = (
    *_UP_TO_32,
    TileChoice(block_m=64, block_n=128, block_w=16, num_warps=4, num_stages=2),
    TileChoice(block_m=128, block_n=128, block_w=16, num_warps=8, num_stages=2),
)
_SHARED_MEMORY_64: Final = TileChoice(block_m=64, block_n=128, block_w=16, num_warps=4, num_stages=2, deep=True)

TILE_CHOICES: Final[Mapping[MatrixUnits, Sequence[TileChoice]]] = MappingProxyType(
    {
        MatrixUnits.THREADS: _THREADS,
        MatrixUnits.REGISTERS: _REGISTERS,
        MatrixUnits.SHARED_MEMORY: (
            *_UP_TO_32,
            _SHARED_MEMORY_64,
            TileChoice(block_m=128, block_n=128, block_w=16, num_warps=4, num_stages=2, deep=True),
            TileChoice(block_m=256, block_n=128, block_w=16, num_warps=8, num_stages=2, deep=True),
        ),
    }
)
"""It maps to choices for rising numbers of rows; the last is for all that are more."""

EXPERT_TILE_CHOICES: Final[Mapping[MatrixUnits, Sequence[TileChoice]]] = MappingProxyType(
    {
        MatrixUnits.THREADS: _THREADS,
        # Gate and up are two products of one program: with the others' choices, their sums would spill.
        MatrixUnits.REGISTERS: (*_EXPERTS_UP_TO_32, *_REGISTERS[2:]),
        MatrixUnits.SHARED_MEMORY: (
            *_EXPERTS_UP_TO_32,
            _SHARED_MEMORY_64,
            TileChoice(block_m=128, block_n=128, block_w=16, num_warps=8, num_stages=2, deep=True),
        ),
    }
)
"""The same for rows of one expert."""


def matrix_units(device: torch.device, dtype: torch.dtype) -> MatrixUnits:
    """Return what multiplies tiles of a dtype on a device."""
    if dtype == torch.float32 or device.type != "cuda":
        return MatrixUnits.THREADS
    if torch.cuda.get_device_capability(device)[0] in (9, 10):
        return MatrixUnits.SHARED_MEMORY
    return MatrixUnits.REGISTERS


def tile_choice(choices: Sequence[TileChoice], num_rows: int) -> TileChoice:
    """Return the choice for a number of rows of activations."""
    return next((choice for choice in choices if num_rows <= choice.block_m), choices[-1])

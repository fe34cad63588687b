"""Holds the tile sizes of products with repacked matrices, by device and number of rows of activations, as found by a
sweep (``python -m benchmarks.gpu --only sweep``).

Compute capability 9.0 was swept on an H200, for the least geometric mean of times with Q4_K and Q6_K and four matrices
of 1536 x 8960 to 14,336 x 4096 (docs/benchmarks/gpu.md). For other devices, choices follow from compiled code: the
fewest instructions per weight without register spills and with shared memory for a second program
(``python -m benchmarks.instruction_counts``).
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
"""The most rows of activations that scalar threads multiply; more rows use matrix instructions.

On an H200, 14,336 x 4096 weights of Q4_K take scalar threads 18 us with one row and 27 with two, and matrix
instructions 28 us with any number up to 16. Over all swept matrices, two rows are equally fast either way.

The kernels for scalar threads take up to 4 rows, because the sweep times them with 1, 2 and 4: on another device, more
may be faster.
"""

DECODE_ALL_ROWS: Final = 256
"""The fewest rows of activations for which the matrix is decoded to memory first, writing and reading 2 bytes a weight.

An H200 decodes 14,336 x 4096 weights of Q4_K in 43 us, and cuBLAS multiplies them with 256 rows in 44: 87 us, compared
with 92 for one tile of 256 rows, and more rows take two tiles. With 128 rows, it is 77 us compared with 52.
"""


class MatrixUnits(Enum):
    """Names the hardware that multiplies tiles."""

    THREADS = "threads"
    """Scalar threads, for float32."""

    REGISTERS = "registers"
    """Matrix instructions of 16 rows, with both operands in registers."""

    SHARED_MEMORY = "shared memory"
    """Also matrix instructions of 64 rows, with operands in shared memory (Hopper's wgmma)."""

    TENSOR_MEMORY = "tensor memory"
    """Matrix instructions of 64 rows and more that accumulate in tensor memory (data-center Blackwell)."""


@frozen
class TileChoice:
    """Describes the tile sizes for a range of numbers of rows of activations.

    :ivar block_m: rows of activations per program; the choice is for at most this many rows
    :ivar block_n: rows of the matrix per program
    :ivar block_w: words of each row that are decoded at once
    :ivar num_warps: warps per program
    :ivar num_stages: tiles in flight at once
    :ivar deep: whether all fields of the words form one product
    :ivar programs: programs per multiprocessor to aim for with splits: several have more loads in flight, which helps
        while memory is the bottleneck; otherwise they only make more sums to join
    """

    block_m: int
    block_n: int
    block_w: int
    num_warps: int
    num_stages: int
    deep: bool = False
    programs: int = 1


# Two warps, because with four Triton would use matrix instructions of 64 rows on Hopper, which has its own choices
# below. 16 words instead of 32: with 32 an H200 takes three times as long for 2 to 8 rows, though not for 16. More
# stages or rows would not fit in the 99 KiB of shared memory of smaller GPUs.
_UP_TO_32: Final = (
    TileChoice(block_m=16, block_n=64, block_w=16, num_warps=2, num_stages=3, programs=4),
    TileChoice(block_m=32, block_n=64, block_w=32, num_warps=2, num_stages=3, programs=4),
)

_EXPERTS_UP_TO_32: Final = tuple(evolve(choice, block_w=16) for choice in _UP_TO_32)
_THREADS: Final = (
    TileChoice(block_m=16, block_n=64, block_w=32, num_warps=4, num_stages=2, programs=4),
    TileChoice(block_m=32, block_n=64, block_w=32, num_warps=4, num_stages=2, programs=4),
)
_REGISTERS: Final = (
    *_UP_TO_32,
    TileChoice(block_m=64, block_n=128, block_w=16, num_warps=4, num_stages=2),
    TileChoice(block_m=128, block_n=128, block_w=16, num_warps=8, num_stages=2),
)
_TENSOR_MEMORY_64: Final = TileChoice(block_m=64, block_n=128, block_w=16, num_warps=4, num_stages=2, deep=True)

TILE_CHOICES: Final[Mapping[MatrixUnits, Sequence[TileChoice]]] = MappingProxyType(
    {
        MatrixUnits.THREADS: _THREADS,
        MatrixUnits.REGISTERS: _REGISTERS,
        MatrixUnits.SHARED_MEMORY: (
            TileChoice(block_m=16, block_n=128, block_w=16, num_warps=4, num_stages=3, programs=4),
            TileChoice(block_m=32, block_n=128, block_w=16, num_warps=4, num_stages=2, programs=4),
            TileChoice(block_m=64, block_n=64, block_w=16, num_warps=4, num_stages=3, deep=True, programs=2),
            TileChoice(block_m=128, block_n=128, block_w=16, num_warps=8, num_stages=4, deep=True),
            TileChoice(block_m=256, block_n=64, block_w=16, num_warps=8, num_stages=3, deep=True),
        ),
        MatrixUnits.TENSOR_MEMORY: (
            *_UP_TO_32,
            _TENSOR_MEMORY_64,
            TileChoice(block_m=128, block_n=128, block_w=16, num_warps=4, num_stages=2, deep=True),
            TileChoice(block_m=256, block_n=128, block_w=16, num_warps=8, num_stages=2, deep=True),
        ),
    }
)
"""Choices for increasing numbers of rows; the last also serves all larger numbers."""

EXPERT_TILE_CHOICES: Final[Mapping[MatrixUnits, Sequence[TileChoice]]] = MappingProxyType(
    {
        MatrixUnits.THREADS: _THREADS,
        # One program computes gate and up: with the choices of other products, their sums would spill.
        MatrixUnits.REGISTERS: (*_EXPERTS_UP_TO_32, *_REGISTERS[2:]),
        MatrixUnits.SHARED_MEMORY: (
            TileChoice(block_m=16, block_n=128, block_w=16, num_warps=4, num_stages=3),
            TileChoice(block_m=32, block_n=128, block_w=16, num_warps=4, num_stages=3),
            TileChoice(block_m=64, block_n=128, block_w=16, num_warps=4, num_stages=3, deep=True),
            TileChoice(block_m=128, block_n=128, block_w=16, num_warps=8, num_stages=3, deep=True),
        ),
        MatrixUnits.TENSOR_MEMORY: (
            *_EXPERTS_UP_TO_32,
            _TENSOR_MEMORY_64,
            TileChoice(block_m=128, block_n=128, block_w=16, num_warps=8, num_stages=2, deep=True),
        ),
    }
)
"""Choices for the rows of one expert, swept with Q4_K and the shape of Qwen3-30B-A3B; ``programs`` is not used."""


def matrix_units(device: torch.device, dtype: torch.dtype) -> MatrixUnits:
    """Return the hardware that multiplies tiles of a dtype on a device."""
    if dtype == torch.float32 or device.type != "cuda":
        return MatrixUnits.THREADS
    by_generation = {9: MatrixUnits.SHARED_MEMORY, 10: MatrixUnits.TENSOR_MEMORY}
    return by_generation.get(torch.cuda.get_device_capability(device)[0], MatrixUnits.REGISTERS)


def tile_choice(choices: Sequence[TileChoice], num_rows: int) -> TileChoice:
    """Return the choice for a number of rows of activations."""
    return next((choice for choice in choices if num_rows <= choice.block_m), choices[-1])

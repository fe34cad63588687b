"""Holds how products with repacked matrices are cut, by device and by rows of activations: one table that is set by a
sweep (``python -m benchmarks.gpu --only sweep``).

Compute capability 9.0 was swept on an H200: Q4_K and Q6_K, four matrices of 1536 x 8960 to 14,336 x 4096, the least
time as a geometric mean (docs/benchmarks/gpu.md). For others, choices follow from the compiled code: the fewest
instructions for each weight whose registers do not spill and whose shared memory leaves room for a second program
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
"""Up to so many rows of activations, threads add up products, and from the next on matrix instructions do.

On an H200, 14,336 x 4096 weights of Q4_K take threads 18 us with one row and 27 with two; they take matrix instructions
28 us with any number up to 16. Over all matrices that were swept, two rows are as fast either way.
"""

DECODE_ALL_ROWS: Final = 256
"""From so many rows of activations on, the matrix is decoded to memory first: 2 bytes a weight are written and read.

An H200 decodes 14,336 x 4096 weights of Q4_K in 43 us, and cuBLAS multiplies 256 rows by them in 44: 87 us beside 92 of
one tile of 256 rows, and more rows take two tiles. With 128 rows, 77 us stand beside 52.
"""


class MatrixUnits(Enum):
    """Names what multiplies tiles."""

    THREADS = "threads"
    """float32 numbers take no matrix instructions."""

    REGISTERS = "registers"
    """Matrix instructions of 16 rows take both factors from registers."""

    SHARED_MEMORY = "shared memory"
    """There are also those of 64 rows, which take factors from shared memory (Hopper)."""

    TENSOR_MEMORY = "tensor memory"
    """Those of 64 rows and more add up in a memory of their own (data-center Blackwell)."""


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


# Two warps, because with four Triton would take matrix instructions of 64 rows on Hopper, which has choices of its own
# below. 16 words and not 32: with 32 an H200 takes three times as long for 2 to 8 rows, though not for 16. What more
# stages or rows need would not fit the 99 KiB of shared memory of smaller GPUs.
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
"""It maps to choices for rising numbers of rows; the last is for all that are more."""

EXPERT_TILE_CHOICES: Final[Mapping[MatrixUnits, Sequence[TileChoice]]] = MappingProxyType(
    {
        MatrixUnits.THREADS: _THREADS,
        # Gate and up are two products of one program: with the others' choices, their sums would spill.
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
"""The same for rows of one expert, swept with Q4_K and the shape of Qwen3-30B-A3B; ``programs`` is not used."""


def matrix_units(device: torch.device, dtype: torch.dtype) -> MatrixUnits:
    """Return what multiplies tiles of a dtype on a device."""
    if dtype == torch.float32 or device.type != "cuda":
        return MatrixUnits.THREADS
    by_generation = {9: MatrixUnits.SHARED_MEMORY, 10: MatrixUnits.TENSOR_MEMORY}
    return by_generation.get(torch.cuda.get_device_capability(device)[0], MatrixUnits.REGISTERS)


def tile_choice(choices: Sequence[TileChoice], num_rows: int) -> TileChoice:
    """Return the choice for a number of rows of activations."""
    return next((choice for choice in choices if num_rows <= choice.block_m), choices[-1])

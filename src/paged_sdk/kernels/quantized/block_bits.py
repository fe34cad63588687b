"""Unpacks the small integers of GGUF blocks, on any device; blocks are rows of bytes, uint8 ``[n, bytes]``."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bit_pairs", "bit_planes", "bits_in_order", "half", "nibbles", "scaled", "shifts"]


def half(blocks: Tensor, offset: int) -> Tensor:
    """Read the float16 at byte ``offset`` of every block, as float32 [blocks, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def shifts(like: Tensor, *numbers: int) -> Tensor:
    """Return bit shifts as a tensor, ``[numbers, 1]``, on the device of ``like``."""
    return torch.tensor(numbers, dtype=torch.uint8, device=like.device).unsqueeze(-1)


def nibbles(packed: Tensor, group: int) -> Tensor:
    """Unpack the two nibbles of every byte; in each ``group`` of bytes, low nibbles come first. [n, b] -> [n, 2 b]."""
    parts = packed.reshape(len(packed), -1, 1, group)
    return torch.cat((parts & 15, parts >> 4), dim=2).reshape(len(packed), -1)


def bit_pairs(packed: Tensor, group: int) -> Tensor:
    """Unpack the 2-bit fields of every byte; in each ``group`` of bytes, lowest come first. [n, b] -> [n, 4 b]."""
    parts = packed.reshape(len(packed), -1, 1, group) >> shifts(packed, 0, 2, 4, 6)
    return (parts & 3).reshape(len(packed), -1)


def bit_planes(packed: Tensor) -> Tensor:
    """Unpack the bits of every byte: the lowest bits of all bytes first. [n, b] -> [n, 8 b]."""
    parts = packed.unsqueeze(1) >> shifts(packed, *range(8))
    return (parts & 1).reshape(len(packed), -1)


def bits_in_order(packed: Tensor) -> Tensor:
    """Unpack the bits byte by byte, lowest first. [n, b] -> [n, 8 b]."""
    return bit_planes(packed).reshape(len(packed), 8, -1).transpose(1, 2).reshape(len(packed), -1)


def scaled(q: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """Compute ``scale * q - minimum``, float32 [n, elements], with one scale (and minimum) per group of elements."""
    out = q.reshape(*scales.shape, -1).float().mul_(scales.unsqueeze(-1))
    if minima is not None:
        out.sub_(minima.unsqueeze(-1))
    return out.reshape(len(q), -1)

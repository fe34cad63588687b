"""Adds up and gathers numbers of several processes of one machine, in memory that they share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from ctypes import addressof, byref, c_char, c_void_p, cast
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.structures import Ranks

__all__ = ["ColumnJoin", "SharedSum", "make_shared_memory"]

# A layer's hidden states of 32 texts of a model of 2,048 numbers fit; of a prompt's chunk, some at a time.
_CAPACITY: Final = 64 * 1024
# What each rank may write at once for the first one to read: 10 rows of half of 200,000 logits. It is memory only where
# it was written.
_BOARD: Final = 1024 * 1024


def make_shared_memory(library: NativeLibrary, size: int) -> int | None:
    """Return a file of memory that so many processes can share, which goes with the last of them; None: the system has
    none without a name.
    """
    if not hasattr(os, "memfd_create"):
        return None
    file = os.memfd_create("paged-sdk ranks", os.MFD_CLOEXEC)
    os.truncate(file, _board(library, size, size))
    return file


def _board(library: NativeLibrary, size: int, rank: int) -> int:
    """Return at which byte of the memory a rank's board begins."""
    sums: int = library.functions.paged_ranks_bytes(size, _CAPACITY)
    return sums + rank * _BOARD * torch.float32.itemsize


class SharedSum:
    """Holds one process's view of the memory.

    :param file: see :func:`make_shared_memory`
    :ivar rank: this process's number
    :ivar sum_address: of the function that adds up, for native calls; ``gather_address`` is of the one that puts
        columns together, ``handle`` of what both are given
    """

    def __init__(self, library: NativeLibrary, file: int, *, rank: int, size: int) -> None:
        self._functions = library.functions
        self._memory = mmap.mmap(file, _board(library, size, size))
        self._boards = [_board(library, size, each) for each in range(size)]
        self._one = torch.zeros(1)
        self.rank = rank
        first = c_char.from_buffer(self._memory)
        self._ranks = Ranks(memory=addressof(first), capacity=_CAPACITY, rank=rank, size=size)
        self.sum_address: int = cast(library.functions.paged_ranks_sum, c_void_p).value or 0
        self.gather_address: int = cast(library.functions.paged_ranks_gather, c_void_p).value or 0
        self.handle: int = addressof(self._ranks)

    @property
    def has_failed(self) -> bool:
        """Say whether a rank had ended before a sum was whole."""
        return bool(self._ranks.failed)

    def add_(self, tensor: Tensor) -> None:
        """Add up a contiguous tensor of float32 in place, unless a rank has ended."""
        self._functions.paged_ranks_sum(byref(self._ranks), tensor.data_ptr(), tensor.numel())

    def join(self, own: Tensor, widths: Tensor) -> Tensor:
        """Put the columns of rows together of which each rank has some, for all ranks, unless a rank has ended.

        :param own: this rank's, float32 ``[num_rows, width]``, with the same rows on all ranks and contiguous ones
        :param widths: how many columns each rank has, contiguous int32
        """
        out = own.new_empty(len(own), int(widths.sum()))
        self._functions.paged_ranks_gather(
            byref(self._ranks), own.data_ptr(), own.stride(0), len(own), widths.data_ptr(), out.data_ptr()
        )
        return out

    def gather(self, own: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Put the columns of rows together of which each rank has some.

        :param own: this rank's, float32 ``[num_rows, width]``, with the same rows on all ranks
        :param widths: how many columns each rank has
        :returns: ``[num_rows, sum of widths]`` on the first rank; None on others
        """
        num_rows, step = len(own), _BOARD // max(widths)
        assert step > 0, "a row does not fit"
        out = own.new_empty(num_rows, sum(widths)) if self.rank == 0 else None
        for first in range(0, num_rows, step):
            rows = slice(first, min(first + step, num_rows))
            if first:
                self.add_(self._one)  # so that the first rank has read what would be overwritten
            if self.rank:
                self._on_board(self.rank, own[rows].shape).copy_(own[rows])
            self.add_(self._one)
            if out is not None:
                others = [self._on_board(rank, (len(own[rows]), width)) for rank, width in enumerate(widths) if rank]
                torch.cat([own[rows], *others], -1, out=out[rows])
        return out

    def _on_board(self, rank: int, shape: Sequence[int]) -> Tensor:
        rows, cols = shape
        board = torch.frombuffer(self._memory, dtype=torch.float32, count=rows * cols, offset=self._boards[rank])
        return board.view(rows, cols)

    def end(self) -> None:
        """Tell all ranks that one has ended, so that none waits for it."""
        self._functions.paged_ranks_end(byref(self._ranks))


@frozen(eq=False)
class ColumnJoin:
    """Puts columns of rows together of which each rank has some, unless a rank has ended.

    :ivar shared: the memory that they go through
    :ivar widths: how many columns each rank has, contiguous int32
    """

    shared: SharedSum
    widths: Tensor

    def __attrs_post_init__(self) -> None:
        assert self.widths.dtype is torch.int32
        assert self.widths.is_contiguous()

    def __call__(self, own: Tensor) -> Tensor:
        """Return the whole rows.

        :param own: this rank's ``[num_rows, width]``, with the same rows on all ranks, of no more than 32 bits a number
        """
        wide = own.to(torch.float32, memory_format=torch.contiguous_format)
        return self.shared.join(wide, self.widths).to(own.dtype)

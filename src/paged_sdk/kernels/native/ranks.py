"""Sums and gathers tensors over the ranks of one machine, through shared memory."""

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

# Floats summed at a time: the hidden states of 32 rows with hidden_size 2,048. Larger tensors are summed in parts.
_CAPACITY: Final = 64 * 1024
# Floats that each rank may write at a time for rank 0 to read: 10 rows of 100,000 logits, half of a vocabulary of
# 200,000. Pages that were never written take no memory.
_BOARD: Final = 1024 * 1024


def make_shared_memory(library: NativeLibrary, size: int) -> int | None:
    """Create an anonymous memory file that ``size`` processes can share, freed with the last of them; return None if
    the system has no memfd_create.
    """
    if not hasattr(os, "memfd_create"):
        return None
    file = os.memfd_create("paged-sdk ranks", os.MFD_CLOEXEC)
    os.truncate(file, _board(library, size, size))
    return file


def _board(library: NativeLibrary, size: int, rank: int) -> int:
    """Return the byte offset of a rank's board within the shared memory."""
    sums: int = library.functions.paged_ranks_bytes(size, _CAPACITY)
    return sums + rank * _BOARD * torch.float32.itemsize


class SharedSum:
    """Holds one rank's view of the shared memory.

    :param file: see :func:`make_shared_memory`
    :ivar rank: this process's rank
    :ivar sum_address: address of the native all-reduce function; ``gather_address`` is that of the all-gather function,
        and ``handle`` that of their first argument
    """

    def __init__(self, library: NativeLibrary, file: int, *, rank: int, size: int) -> None:
        self._functions = library.functions
        self._memory = mmap.mmap(file, _board(library, size, size))
        self._boards = [_board(library, size, each) for each in range(size)]
        self._one = torch.zeros(1, dtype=torch.float32)
        self.rank = rank
        first = c_char.from_buffer(self._memory)
        self._ranks = Ranks(memory=addressof(first), capacity=_CAPACITY, rank=rank, size=size)
        self.sum_address: int = cast(library.functions.paged_ranks_sum, c_void_p).value or 0
        self.gather_address: int = cast(library.functions.paged_ranks_gather, c_void_p).value or 0
        self.handle: int = addressof(self._ranks)

    @property
    def has_failed(self) -> bool:
        """Return whether a rank ended before a sum or gather was complete."""
        return bool(self._ranks.failed)

    def add_(self, tensor: Tensor) -> None:
        """Sum a contiguous float32 tensor over all ranks, in place; check :attr:`has_failed` afterwards."""
        self._functions.paged_ranks_sum(byref(self._ranks), tensor.data_ptr(), tensor.numel())

    def join(self, own: Tensor, widths: Tensor) -> Tensor:
        """Concatenate the columns of all ranks, on every rank (all-gather); check :attr:`has_failed` afterwards.

        :param own: this rank's columns, float32 ``[num_rows, width]``, each row contiguous; all ranks have the same
            number of rows
        :param widths: the number of columns of each rank, contiguous int32
        """
        out = own.new_empty(len(own), int(widths.sum()))
        self._functions.paged_ranks_gather(
            byref(self._ranks), own.data_ptr(), own.stride(0), len(own), widths.data_ptr(), out.data_ptr()
        )
        return out

    def gather(self, own: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Concatenate the columns of all ranks on rank 0.

        :param own: this rank's columns, float32 ``[num_rows, width]``; all ranks have the same number of rows
        :param widths: the number of columns of each rank
        :returns: ``[num_rows, sum of widths]`` on rank 0; None on other ranks
        """
        num_rows, step = len(own), _BOARD // max(widths)
        assert step > 0, "a row does not fit"
        out = own.new_empty(num_rows, sum(widths)) if self.rank == 0 else None
        for first in range(0, num_rows, step):
            rows = slice(first, min(first + step, num_rows))
            if first:
                self.add_(self._one)  # a barrier: rank 0 has read the previous rows
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
        """Mark the group as failed, so that no rank waits for one that has ended."""
        self._functions.paged_ranks_end(byref(self._ranks))


@frozen(eq=False)
class ColumnJoin:
    """Concatenates the columns of all ranks, on every rank; see :meth:`SharedSum.join`.

    :ivar shared: the shared memory
    :ivar widths: the number of columns of each rank, contiguous int32
    """

    shared: SharedSum
    widths: Tensor

    def __attrs_post_init__(self) -> None:
        assert self.widths.dtype is torch.int32
        assert self.widths.is_contiguous()

    def __call__(self, own: Tensor) -> Tensor:
        """Return the rows with all columns.

        :param own: this rank's columns, ``[num_rows, width]``, of a dtype that float32 holds exactly; all ranks have
            the same number of rows
        """
        wide = own.to(torch.float32, memory_format=torch.contiguous_format)
        return self.shared.join(wide, self.widths).to(own.dtype)

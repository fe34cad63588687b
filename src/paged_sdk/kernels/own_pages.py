"""Take memory for weights from the system."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

__all__ = ["own_pages"]

_LARGE: Final = 1 << 20


def own_pages(num_bytes: int) -> Tensor:
    """Return memory, uint8 ``[num_bytes]``.

    If it is large, it has pages of its own, which go back to the system with the tensor: on the heap what is dropped
    would leave holes between what stays, 300 MB of them with Qwen2.5-1.5B.
    """
    if num_bytes < _LARGE:
        return torch.empty(num_bytes, dtype=torch.uint8)
    # Shared pages, which are the default where there is a choice, would count as those of a file.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, num_bytes, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Else each of 4 KiB is a fault of its own: 53 ms for 100 MB, and 15 ms with this.
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)

"""Return memory that the process has freed to the system."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["return_free_memory"]


def return_free_memory() -> None:
    """Make glibc return the free pages of its heaps to the system; without glibc, do nothing.

    Otherwise glibc keeps them for later allocations: 10 MiB after loading SmolLM2, mostly of the thread that made the
    tokenizer. This takes a few milliseconds, without the GIL.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(ctypes.c_size_t(0))

"""Return memory that the process has freed to the system."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["return_free_memory"]


def return_free_memory() -> None:
    """Have the C library give back the pages of its heaps that hold nothing any more; elsewhere than on glibc nothing
    happens.

    It keeps them otherwise, for allocations to come: 10 MiB after loading SmolLM2, most of them of the thread that made
    the tokenizer. Python's lock is not held meanwhile, for some milliseconds.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # a function of glibc's alone
    if trim is not None:
        trim(ctypes.c_size_t(0))

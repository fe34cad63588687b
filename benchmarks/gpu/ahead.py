"""Compile Triton kernels side by side before they are timed, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from paged_sdk.system.processors import usable_processors

__all__ = ["compile_side_by_side"]


def compile_side_by_side(calls: Iterable[Callable[[], object]]) -> None:
    """Make calls on as many threads as there are processors: most of a compilation is done without the interpreter's
    lock. With nothing in Triton's cache, 390 kernels of a second or two each would take longer than a part has.

    A call that fails does so again where it is timed.
    """
    with ThreadPoolExecutor(usable_processors()) as pool:
        for done in as_completed([pool.submit(call) for call in calls]):
            done.exception()
    if torch.cuda.is_available():
        torch.cuda.synchronize()

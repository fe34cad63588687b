"""Compile Triton kernels in parallel, before they are timed one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from paged_sdk.system.processors import usable_processors

__all__ = ["compile_side_by_side"]


def compile_side_by_side(calls: Iterable[Callable[[], object]]) -> None:
    """Make calls on as many threads as there are processors, since most of a compilation runs without the GIL. With an
    empty Triton cache, compiling 390 kernels one by one, at a second or two each, would exceed a part's time limit.

    Errors are ignored: they are raised again when the call is timed.
    """
    with ThreadPoolExecutor(usable_processors()) as pool:
        for done in as_completed([pool.submit(call) for call in calls]):
            done.exception()
    if torch.cuda.is_available():
        torch.cuda.synchronize()

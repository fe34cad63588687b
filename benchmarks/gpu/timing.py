"""Time calls on a CUDA device as medians of many, and measure the device's own limits in the same run."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Row", "copy_bandwidth", "count_launches", "launched_microseconds", "matmul_tflops", "microseconds"]

Row: TypeAlias = dict[str, Any]
"""Holds a figure: ``kernel``, ``case``, the measurements by unit, and under ``reference`` those to compare with."""

_ROUNDS: Final = 25
_WARM_UP: Final = 3

#: By how the names of the runtime's and the driver's calls begin.
_CALLS: Final = MappingProxyType(
    {
        "cudaGraphLaunch": "graphs",
        "cuGraphLaunch": "graphs",
        "cudaLaunchKernel": "kernels",
        "cuLaunchKernel": "kernels",
        "cudaMemcpyAsync": "copies",
        "cuMemcpy": "copies",
    }
)


def microseconds(call: Callable[[], object]) -> float:
    """Return the device's time for a call: the median of replays of a CUDA graph, so without launches from Python."""
    for _ in range(_WARM_UP):  # what is compiled or chosen at the first call cannot be captured
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return launched_microseconds(graph.replay)


def launched_microseconds(call: Callable[[], object]) -> float:
    """Return the device's time for a call with its waits for Python: the median of many."""
    for _ in range(_WARM_UP):
        call()
    event: Any = torch.cuda.Event  # it has no annotations
    times: list[float] = []
    for _ in range(_ROUNDS):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times)


@contextmanager
def count_launches(counts: Counter[str]) -> Iterator[None]:
    """Count what all threads ask of a CUDA device within the block: launches of kernels and of graphs, and copies.
    Without such a device nothing is counted.
    """
    if not torch.cuda.is_available():
        yield
        return
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        yield
        torch.cuda.synchronize()
    for event in found.events() or ():
        kind = next((kind for name, kind in _CALLS.items() if event.name.startswith(name)), None)
        if kind is not None:
            counts[kind] += 1


def copy_bandwidth(device: torch.device) -> float:
    """Return the GB/s of a copy on the device, its reads and writes both counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Not by a graph, which leaves copies to the engines that serve the host: 2.7 TB/s on an H200, and 4.2 by a kernel.
    return 2 * source.nbytes / launched_microseconds(lambda: target.copy_(source)) / 1000


def matmul_tflops(device: torch.device) -> float:
    """Return the TFLOP/s of torch's product of two large bfloat16 matrices."""
    size = 8192
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * size**3 / microseconds(lambda: left @ right) / 1e6

"""Time calls on a CUDA device as medians over many, and measure the device's limits in the same run."""

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
"""A result: ``kernel``, ``case``, the measurements by unit, and under ``reference`` those to compare with."""

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
    """Return the device time of a call: the median over replays of a CUDA graph, without launches from Python."""
    for _ in range(_WARM_UP):  # compilation and autotuning in the first calls cannot be captured
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return launched_microseconds(graph.replay)


def launched_microseconds(call: Callable[[], object]) -> float:
    """Return the device time of a call including waits for launches from Python: the median over many."""
    for _ in range(_WARM_UP):
        call()
    event: Any = torch.cuda.Event  # its constructor has no annotations
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
    """Count launches of kernels and graphs, and copies, by all threads within this context. Without a CUDA device,
    nothing is counted.
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
    """Return the GB/s of a device copy, counting both reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Not by a graph, which would use the copy engines: 2.7 TB/s on an H200, instead of 4.2 TB/s by a kernel.
    return 2 * source.nbytes / launched_microseconds(lambda: target.copy_(source)) / 1000


def matmul_tflops(device: torch.device) -> float:
    """Return the TFLOP/s of torch's product of two large bfloat16 matrices."""
    size = 8192
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * size**3 / microseconds(lambda: left @ right) / 1e6

"""Records functions as CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from paged_sdk.runner.device import return_cached_memory

__all__ = ["CudaGraphRecorder"]


class CudaGraphRecorder:
    """Records functions as CUDA graphs that share a memory pool: only one of them may run at a time. After a failed
    recording, later graphs share a new pool.

    :param device: the device of all tensors that the functions use, with its index
    :param is_trial: whether the recorded graphs will never be replayed
    """

    def __init__(self, device: torch.device, *, is_trial: bool = False) -> None:
        self._device = device
        self._is_trial = is_trial
        self._pool: Any = None
        self._stream: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # graphs of the current pool
        self._has_failed = False

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run a function, then run it again while recording it, and return a function that replays the graph on the
        current stream.

        :raises RuntimeError: the function does something that cannot be recorded, such as waiting for the device
        """
        with torch.cuda.device(self._device):
            if self._has_failed:  # during a capture torch could not reclaim the memory of the failed recording
                return_cached_memory()
                self._has_failed = False
            if not self._graphs:
                self._begin_pool()
            # This run compiles kernels. It is not on the recording's stream: a workspace that cuBLAS allocated for that
            # stream here would not belong to the graph's pool, and could be freed while the graph uses it.
            function()
            graph = torch.cuda.CUDAGraph()
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            # Not torch.cuda.graph(): it empties torch's cache first, so models that are serving would have to allocate
            # again after each of some dozen recordings; and if a recording fails, it leaves its stream current.
            with torch.cuda.stream(self._stream):
                self._record(graph, function)
        return graph.replay

    def _begin_pool(self) -> None:
        """Start a new memory pool: torch refuses a pool whose last graph has been destroyed.

        cuBLAS keeps one workspace per stream, allocated from the pool of the first graph that ran a matrix product on
        that stream. torch may free it once that pool's graphs are destroyed, for example if the application uses
        torch.compile. So graphs that are replayed do not share a stream with other recorders.
        """
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _stream_of_trials(self._device) if self._is_trial else _make_stream(self._device)

    def _record(self, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
        try:
            try:
                # thread_local: other threads may use the device meanwhile, such as another model's. capture_begin may
                # fail after the allocator has switched to the pool.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                function()
            finally:
                try:
                    graph.capture_end()
                except RuntimeError:
                    self._end_pool()
                    raise
        except BaseException:
            # The pool is not used again: if the driver refuses to end its capture, torch's pinned-memory allocator
            # keeps recording into it.
            self._graphs.clear()
            self._has_failed = True
            raise
        self._graphs.add(graph)

    def _end_pool(self) -> None:
        """Detach the allocator from the pool of a failed recording, which torch omits if the driver refused to end the
        capture. Otherwise the pool would keep its memory, and blocks that wait for other streams would never be freed.
        """
        index = self._device.index or 0
        try:
            torch._C._cuda_endAllocateToPool(index, self._pool)
        except RuntimeError:  # torch has detached it
            return
        torch._C._cuda_releasePool(index, self._pool)


@functools.cache
def _stream_of_trials(device: torch.device) -> Any:
    return _make_stream(device)


def _make_stream(device: torch.device) -> Any:
    make: Any = torch.cuda.Stream  # it has no annotations
    return make(device)

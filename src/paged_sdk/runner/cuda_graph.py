"""Records work on a CUDA device as a graph that one launch replays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from paged_sdk.runner.device import return_cached_memory

__all__ = ["CudaGraphRecorder"]


class CudaGraphRecorder:
    """Records functions as CUDA graphs, which share one pool of memory: only one of them runs at a time. After a
    recording that has failed, those that follow share another.

    :param device: the device of all tensors that the functions use, with its index
    :param is_trial: whether nothing that is recorded will be replayed
    """

    def __init__(self, device: torch.device, *, is_trial: bool = False) -> None:
        self._device = device
        self._is_trial = is_trial
        self._pool: Any = None
        self._stream: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # of that pool
        self._has_failed = False

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run a function twice, the second time to record it, and return what replays it on the current stream.

        :raises RuntimeError: the function waits for the device, or does something else that cannot be recorded
        """
        with torch.cuda.device(self._device):
            if self._has_failed:  # amid a recording torch takes no memory back from what that has left
                return_cached_memory()
                self._has_failed = False
            if not self._graphs:
                self._begin_pool()
            # This run compiles kernels. It is not on the stream of the recording: a workspace that cuBLAS allocated
            # there would not belong to the graph, and others might free it.
            function()
            graph = torch.cuda.CUDAGraph()
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            # Not torch.cuda.graph(), which empties torch's cache first: other models at work had to fill theirs again
            # after each of some dozen recordings. Where a recording fails, it also leaves its stream current.
            with torch.cuda.stream(self._stream):
                self._record(graph, function)
        return graph.replay

    def _begin_pool(self) -> None:
        """Have graphs share another pool than before: torch refuses one whose last graph has gone.

        For each stream, cuBLAS keeps a workspace that is memory of the pool whose graphs were the first to multiply
        there. An application that compiles models of its own with torch may have it freed once they have gone, so no
        graph that is replayed gets a stream of others'.
        """
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _stream_of_trials(self._device) if self._is_trial else _make_stream(self._device)

    def _record(self, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
        try:
            try:
                # Other threads may use the device meanwhile, since another model may be at work. This may fail when the
                # allocator has begun already.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                function()
            finally:
                try:
                    graph.capture_end()
                except RuntimeError:
                    self._end_pool()
                    raise
        except BaseException:
            # Of a pool that the driver has refused to end, torch's allocator of pinned memory goes on recording.
            self._graphs.clear()
            self._has_failed = True
            raise
        self._graphs.add(graph)

    def _end_pool(self) -> None:
        """Let the allocator leave the pool of a recording that has failed: torch has not if the driver refused to end
        it. The pool would keep its memory, and blocks that wait for other streams would never be free again.
        """
        index = self._device.index or 0
        try:
            torch._C._cuda_endAllocateToPool(index, self._pool)
        except RuntimeError:  # torch has left it
            return
        torch._C._cuda_releasePool(index, self._pool)


@functools.cache
def _stream_of_trials(device: torch.device) -> Any:
    return _make_stream(device)


def _make_stream(device: torch.device) -> Any:
    make: Any = torch.cuda.Stream  # it has no annotations
    return make(device)

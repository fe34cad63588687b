"""Recording work on a CUDA device, to launch it as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CudaGraphRecorder"]


class CudaGraphRecorder:
    """Records functions as CUDA graphs, which share one pool of memory: only one of them runs at a time.

    :param device: of everything that the functions touch
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        stream: Any = torch.cuda.Stream  # it has no annotations
        self._stream = stream(device)

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run a function twice, the second time to record it, and return what replays it on the current stream.

        :raises RuntimeError: it waits for the device, or does something else that cannot be recorded
        """
        # Where recording fails, torch leaves its stream the current one: the outer context puts that right.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            # Compiles kernels. Not on the stream of the recording: a workspace that cuBLAS got there before would not
            # be the graph's own, and others might free it.
            function()
            graph = torch.cuda.CUDAGraph()
            # What other threads do on the device meanwhile is their own: another model may be at work.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                function()
        return graph.replay

"""Records work on a CUDA device as a graph that one launch replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CudaGraphRecorder"]


class CudaGraphRecorder:
    """Records functions as CUDA graphs, which share one pool of memory: only one of them runs at a time.

    :param device: the device of all tensors that the functions use
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        stream: Any = torch.cuda.Stream  # it has no annotations
        self._stream = stream(device)

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run a function twice, the second time to record it, and return what replays it on the current stream.

        :raises RuntimeError: the function waits for the device, or does something else that cannot be recorded
        """
        # Where recording fails, torch leaves its stream current: the outer context restores the previous one.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            # This run compiles kernels. It is not on the stream of the recording: a workspace that cuBLAS allocated
            # there would not belong to the graph, and others might free it.
            function()
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile, since another model may be at work.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                function()
        return graph.replay

"""Runs device operations concurrently with operations that were launched earlier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["SideStream"]


class SideStream:
    """Runs operations on a high-priority CUDA stream, so that the host can wait for them alone while others are queued.

    On other devices operations run in the order of the calls.
    """

    def __init__(self, device: torch.device) -> None:
        streams: Any = torch.cuda  # they have no annotations
        self._device = device
        self._event: Any = streams.Event if device.type == "cuda" else None
        self._stream = streams.Stream(device, priority=-1) if device.type == "cuda" else None

    def mark(self) -> Any:
        """Record the operations launched so far, and return the mark that :meth:`beside` takes."""
        if self._stream is None:
            return None
        event = self._event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def beside(self, mark: Any) -> Iterator[None]:
        """Run the block's operations concurrently with those launched since the mark; wait for them at the block's end.

        The operations may read tensors made before the mark. These, and tensors made in the block, may be freed once
        the block has ended.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_event(mark)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()

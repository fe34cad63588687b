"""Runs operations on a device beside those that were launched before them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["SideStream"]


class SideStream:
    """Lets the host wait for some operations on a CUDA device while many others are under way there.

    They go before others that have not begun. On other devices everything runs in the order of the calls.
    """

    def __init__(self, device: torch.device) -> None:
        streams: Any = torch.cuda  # they have no annotations
        self._device = device
        self._event: Any = streams.Event if device.type == "cuda" else None
        self._stream = streams.Stream(device, priority=-1) if device.type == "cuda" else None

    def mark(self) -> Any:
        """Return what :meth:`beside` takes for what was launched until now."""
        if self._stream is None:
            return None
        event = self._event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def beside(self, mark: Any) -> Iterator[None]:
        """Launch the operations of a block beside what was launched since a mark, and wait for them at its end.

        They may read tensors that were made before the mark. These, and what the block makes, may be dropped as soon as
        it has ended.
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

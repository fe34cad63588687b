"""Holds the KV of a chat's prefix for synchronous code."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

from paged_sdk.blocking_loop import BlockingLoop
from paged_sdk.calls.pin import Pin
from paged_sdk.errors import ModelClosedError
from paged_sdk.system.owner import OfOneProcess

__all__ = ["BlockingPin"]


class BlockingPin(OfOneProcess):
    """Holds the KV of a chat's prefix until it is released: a :class:`Pin` for synchronous code."""

    def __init__(self, model: BlockingLoop, pin: Pin) -> None:
        self._loop = model
        self._pin = pin

    @property
    def num_tokens(self) -> int:
        """Return how many tokens are pinned; see :attr:`Pin.num_tokens`."""
        return self._pin.num_tokens

    @property
    def is_released(self) -> bool:
        """Tell whether the KV is no longer held; see :attr:`Pin.is_released`."""
        return self._pin.is_released

    def close(self) -> None:
        """Release the KV. Idempotent."""
        with suppress(ModelClosedError):  # closing the model has released it
            self._loop._call(self._pin.aclose)

    def __enter__(self) -> BlockingPin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

"""Limit what a template may produce, and how long, while it is rendered in the application's own process."""

from __future__ import annotations

import time
from typing import Any

from jinja2.runtime import Context

from paged_sdk.chat.plain_data import DataSize, TooLargeError, measure
from paged_sdk.chat.sandbox import TemplateEnvironment

__all__ = ["MeteredContext", "NotCheapError"]

_MAX_SECONDS = 0.25
_MAX_WEIGHED = 1 << 21
"""Limits the weight of data that a single operation traverses to 130,000 items, which takes 50 ms."""


class NotCheapError(Exception):
    """Says that a template must be rendered in a helper process, which can be killed."""


class MeteredContext(Context):
    """Holds the variables of one rendering, and its remaining budget of characters and time."""

    def __init__(self, environment: TemplateEnvironment, *args: Any, **kwargs: Any) -> None:
        super().__init__(environment, *args, **kwargs)
        limits = environment.limits
        self._left = limits.max_chars
        self._deadline = time.monotonic() + min(_MAX_SECONDS, limits.max_seconds)

    def charge(self, chars: int) -> None:
        self._left -= chars
        if self._left < 0:
            raise NotCheapError("it makes too much text")

    def check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise NotCheapError("it takes too long")

    def measure(self, value: object) -> DataSize:
        """Return the size of plain data that is about to be traversed, and charge its weight."""
        try:
            size = measure(value, limit=_MAX_WEIGHED)
        except TooLargeError as exc:
            raise NotCheapError(str(exc)) from None
        self.charge(size.weight)
        return size

"""Notices kernels that are compiled for requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from paged_sdk.logs import get_logger

__all__ = ["KernelCounts", "LiveCompilations"]

_log = get_logger(__name__)


class KernelCounts(Protocol):
    """Counts the kernels that are compiled so far."""

    @property
    def total(self) -> int:
        """Return how many there are."""
        ...

    def by_name(self) -> Mapping[str, int]:
        """Return how many variants there are of each."""
        ...


class LiveCompilations:
    """Counts the kernels that steps of requests had to wait for, and warns of each: it takes a second or more, and is a
    kernel that the steps for trial should have launched.

    Those that another model's building compiles meanwhile on the same device are counted, too.

    :ivar count: so many so far
    """

    def __init__(self, counts: KernelCounts) -> None:
        self._counts = counts
        self._before: Mapping[str, int] = counts.by_name()
        self.count: int = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notice those that are compiled while the block launches a step."""
        start = self._counts.total
        yield
        new = self._counts.total - start
        if new:
            self.count += new
            now = self._counts.by_name()
            names = sorted(name for name, count in now.items() if count > self._before.get(name, 0))
            self._before = now
            _log.warning(
                "A step waited while %d kernels were compiled or loaded (%s): %d since the model was built.",
                new,
                ", ".join(names),
                self.count,
            )

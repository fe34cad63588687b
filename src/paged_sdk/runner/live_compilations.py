"""Detects kernels that are compiled while requests run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from paged_sdk.logs import get_logger

__all__ = ["KernelCounts", "LiveCompilations"]

_log = get_logger(__name__)


class KernelCounts(Protocol):
    """Counts the kernels compiled so far."""

    @property
    def total(self) -> int:
        """Return their number."""
        ...

    def by_name(self) -> Mapping[str, int]:
        """Return the number of compiled variants by kernel name."""
        ...


class LiveCompilations:
    """Counts and logs kernels that steps of requests had to wait for. Each takes a second or more, and should have been
    launched by the trial steps.

    Kernels that another model compiles meanwhile, while it is built on the same device, are counted too.

    :ivar count: number of such kernels so far
    """

    def __init__(self, counts: KernelCounts) -> None:
        self._counts = counts
        self._before: Mapping[str, int] = counts.by_name()
        self.count: int = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the kernels that are compiled while the block launches a step."""
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

"""Report which replicas Ray Serve has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Watch"]


class Watch:
    """Receives the names of the running replicas whenever they change, from the router of a handle.

    It is passed as an argument of a call, because Ray Serve constructs the router itself and gives no access to it. The
    copy that a replica receives reports to nobody.

    :param on_change: receives the names, on the router's thread
    """

    def __init__(self, on_change: Callable[[frozenset[str]], object] | None = None) -> None:
        self._on_change = on_change

    def note(self, names: frozenset[str]) -> None:
        """Report that exactly these replicas are running."""
        if self._on_change is not None:
            self._on_change(names)

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, ()

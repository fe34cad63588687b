"""Follow which replicas Ray Serve has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Watch"]


class Watch:
    """Is told which replicas there are, whenever that changes, by what routes the calls of a handle.

    It is an argument of a call, because Ray Serve makes the router itself and lets nobody else at it. What a replica
    gets tells nobody.

    :param on_change: gets their names, on the thread that routes
    """

    def __init__(self, on_change: Callable[[frozenset[str]], object] | None = None) -> None:
        self._on_change = on_change

    def note(self, names: frozenset[str]) -> None:
        """Take it that these replicas are running, and no others."""
        if self._on_change is not None:
            self._on_change(names)

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, ()

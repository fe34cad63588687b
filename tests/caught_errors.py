"""Tell whether errors live on in circles of references."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Awaitable, Callable

from talk import until

__all__ = ["KnownError", "goes_when_caught"]


class KnownError(Exception):
    """Is what a test raises: one of a class of Python's own cannot be watched."""


async def goes_when_caught(ask: Callable[[], Awaitable[object]]) -> None:
    """Fail unless a :class:`KnownError` goes with whoever has caught it: no circle of references keeps it, and all that
    its frames hold, until garbage is looked for.
    """
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            gone: weakref.ref[KnownError] | None = None
            try:
                await ask()
            except KnownError as error:
                gone = weakref.ref(error)
            assert gone is not None, "nothing was raised"
            await until(lambda gone=gone: gone() is None)  # type: ignore[misc]
    finally:
        gc.enable()

"""Start threads, and say with a typed error that the system gives a process no more of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio
import anyio.to_thread

from paged_sdk.errors import EngineError

__all__ = ["in_own_thread", "thread_must_start"]

_T = TypeVar("_T")


@contextmanager
def thread_must_start(purpose: str) -> Iterator[None]:
    """Turn the failure to start a thread in the block into a typed error.

    :param purpose: what the thread is for
    :raises EngineError: the system gives this process no more threads
    """
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):  # Python has no class of its own for it
            raise
        raise EngineError(f"no thread {purpose}: the system gives this process no more ({error})") from error


async def in_own_thread(function: Callable[[], _T], purpose: str, *, abandon_on_cancel: bool = True) -> _T:
    """Run a function in a thread that is none of the 40 that anyio has for an event loop's applications: all of these
    may be waiting for what the function does.

    :param purpose: what the thread is for
    :param abandon_on_cancel: whoever is cancelled does not wait for its end
    :raises EngineError: the system gives this process no more threads
    """
    own = anyio.CapacityLimiter(1)
    with thread_must_start(purpose):
        return await anyio.to_thread.run_sync(function, abandon_on_cancel=abandon_on_cancel, limiter=own)

"""Say with a typed error that the system gives a process no more threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paged_sdk.errors import EngineError

__all__ = ["thread_must_start"]


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

"""Keep an exception that is raised in the work for one request away from all other requests."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from paged_sdk.errors import NumericalError, PagedError, RequestError, RequestFailedError, RequestTimeoutError

if TYPE_CHECKING:
    from paged_sdk.errors import PartialResponse

__all__ = ["RequestGuard", "clear_frames", "drop_tracebacks", "request_failure", "request_timeout"]


class RequestGuard:
    """Surrounds work that is done for one request: an exception in it ends that request and nothing else.

    The exception is swallowed and handed on as a typed error. What ends the thread (``SystemExit``) or the task (its
    cancellation) is no ``Exception`` and passes.

    :param request_id: the request that the work is for
    :param fail: ends the request with the error
    """

    __slots__ = ("_fail", "_request_id")

    def __init__(self, request_id: str, fail: Callable[[PagedError], object]) -> None:
        self._request_id = request_id
        self._fail = fail

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._fail(request_failure(error, self._request_id))
        return True


def request_failure(error: Exception, request_id: str) -> PagedError:
    """Return the error that a request ends with when the work for it has raised ``error``.

    :returns: ``error`` itself if it is typed, otherwise a :class:`RequestFailedError` with ``error`` as its cause
    """
    if isinstance(error, RequestError | NumericalError):
        error.request_id = error.request_id or request_id
    if isinstance(error, PagedError):
        return error
    failure = RequestFailedError(f"request {request_id} failed: {error!r}", request_id=request_id)
    failure.__cause__ = error
    return failure


def request_timeout(
    request_id: str, timeout: float, partial_response: PartialResponse | None = None
) -> RequestTimeoutError:
    """Return the error that a request ends with when its own timeout, in seconds, has passed."""
    return RequestTimeoutError(
        f"request {request_id} did not finish within its timeout of {timeout:g} s",
        request_id=request_id,
        partial_response=partial_response,
        timeout=timeout,
    )


def clear_frames(error: BaseException) -> None:
    """Let go of what an exception's frames hold, and those of the exceptions that it was raised from or beside: their
    tensors would live as long as the error does. Frames that still run are left alone.
    """
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)


def drop_tracebacks(error: BaseException) -> None:
    """Let go of where an exception was raised, and of where those were that it was raised from or beside.

    Whoever keeps an error needs this where a frame that still runs, its own for one, is not to live as long.
    """
    for each in _chain(error):
        each.__traceback__ = None


def _chain(error: BaseException) -> Iterator[BaseException]:
    left, seen = [error], set[int]()
    while left:
        each = left.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [other for other in (each.__cause__, each.__context__) if other is not None]

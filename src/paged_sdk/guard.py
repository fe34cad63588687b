"""Confine an exception raised in work for one request to that request."""

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
    """Wraps work for one request: an exception in it ends that request and nothing else.

    The exception is swallowed and passed to ``fail`` as a typed error. Exceptions that end the thread (``SystemExit``)
    or the task (cancellation) are not subclasses of ``Exception`` and propagate.

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
    """Return the error that ends a request when work for it has raised ``error``.

    :returns: ``error`` itself if it is a :class:`PagedError`, otherwise a :class:`RequestFailedError` with ``error`` as
        its cause
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
    """Return the error that ends a request when its own timeout, in seconds, has passed."""
    return RequestTimeoutError(
        f"request {request_id} did not finish within its timeout of {timeout:g} s",
        request_id=request_id,
        partial_response=partial_response,
        timeout=timeout,
    )


def clear_frames(error: BaseException) -> None:
    """Clear the local variables in the frames of an exception and of its causes and contexts, so that the error does
    not keep tensors alive. Frames that are still running are left alone.
    """
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)


def drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an exception and of its causes and contexts.

    Needed before storing an error if its traceback would keep alive a frame that is still running, such as the
    caller's.
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

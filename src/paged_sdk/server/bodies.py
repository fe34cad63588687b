"""Receives and parses the bodies of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request

from paged_sdk.server.disconnect import CLIENT_DISCONNECTED
from paged_sdk.server.drain import Drain
from paged_sdk.server.image_urls import ImageUrls
from paged_sdk.server.threads import in_thread
from paged_sdk.wire.body import read_json
from paged_sdk.wire.problem import Problem, ProblemError

__all__ = ["read_body"]

T = TypeVar("T")

LARGE_BODY: Final = 1 << 16
"""Size in bytes from which a body is parsed in a thread: parsing as much takes a millisecond."""
BODY_SECONDS: Final = 30.0
SLOWEST_BODY: Final = 16 << 10
"""A body may take BODY_SECONDS, and one second more for every SLOWEST_BODY bytes: slower clients would use up
connections.
"""


async def read_body(
    request: Request, read: Callable[[object], T], limit: int, drain: Drain, *, images: ImageUrls | None = None
) -> T:
    """Receive and parse the body of a request.

    :param read: parses the JSON value
    :param limit: maximum size in bytes
    :param images: fetches images that the body refers to by URL
    :raises ProblemError: the body is too long, arrives too slowly, or its content type is not JSON; or the server shuts
        down before it has arrived
    :raises PagedError: the body is malformed, or asks for something unsupported
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # browsers let any web page post other types without asking the server (CORS)
        message = f"the body's type is {kind[:100] or 'not given'}: expected the header Content-Type: application/json"
        raise ProblemError(Problem(status=415, message=message, code="unsupported_media_type"))
    data = await _data(request, limit, drain)
    if images is not None and images.hosts:
        value = await images.fill(await in_thread(lambda: read_json(data)))
        return await in_thread(lambda: read(value))
    return read(read_json(data)) if len(data) < LARGE_BODY else await in_thread(lambda: read(read_json(data)))


async def _data(request: Request, limit: int, drain: Drain) -> bytes:
    pieces, length = [], 0
    stated = request.headers.get("content-length", "")
    if stated.isascii() and stated.isdecimal() and int(stated) > limit:  # before the client has sent it
        raise _too_long(limit)
    start = anyio.current_time()
    try:
        with drain.coming() as scope:
            scope.deadline = start + BODY_SECONDS
            async for piece in request.stream():
                length += len(piece)
                if length > limit:
                    raise _too_long(limit)
                pieces.append(piece)
                scope.deadline = start + BODY_SECONDS + length / SLOWEST_BODY
    except ClientDisconnect:
        raise ProblemError(Problem(status=CLIENT_DISCONNECTED, message="the client has disconnected")) from None
    if scope.cancelled_caught and drain.has_begun:
        raise ProblemError(drain.refusal)
    if scope.cancelled_caught:
        message = f"the body arrives too slowly: {length} bytes in {anyio.current_time() - start:.0f} s"
        raise ProblemError(Problem(status=408, message=message, code="timeout", headers={"Connection": "close"}))
    return b"".join(pieces)


def _too_long(limit: int) -> ProblemError:
    """Return the problem of a body that is too long. The connection stays open, and the rest of the body is discarded:
    closing it while the client sends would reset it, and many clients would then lose the response.
    """
    return ProblemError(Problem(status=413, message=f"the body is longer than {limit} bytes", code="body_too_large"))

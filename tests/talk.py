"""Ask models something: what the tests of replicas have in common, wherever the replicas run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import anyio

from paged_sdk import Model, RequestBuilder

__all__ = ["LONG", "hello", "said", "until"]

LONG: Final = "A sentence that is said one byte after the other. " * 4


def hello(text: str = "Hi!", **options: Any) -> RequestBuilder:
    """Return a request.

    :param options: what the builder's ``with_NAME`` take
    """
    request = RequestBuilder.from_messages([{"role": "user", "content": text}])
    for name, value in options.items():
        request = getattr(request, f"with_{name}")(value)
    return request


async def said(model: Model, request: RequestBuilder | None = None) -> str:
    """Return what a model says to a request."""
    return (await model.send_chat_request(request or hello())).choices[0].message.content


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that is going to be so, and fail if it takes too long."""
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.001)

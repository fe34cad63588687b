"""Defines what the APIs that generate text have in common: a parsed request (``Call``) and a writer of its events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

from attrs import field, frozen

from paged_sdk import ChatCompletionResponse, ChatStream, Model, RequestBuilder, Usage
from paged_sdk.wire.problem import Problem

__all__ = ["Answer", "AnswerStream", "Call", "ChatCall", "EventWriter", "event"]

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
"""Made once: constructing an encoder takes as long as encoding an event of one token."""

_LINE_ENDS: Final = tuple((end, f"\\u{ord(end):04x}") for end in "\x85\u2028\u2029")
"""Characters that JSON and server-sent events may contain unescaped, but at which ``str.splitlines`` splits lines:
clients that read events line by line with Python's HTTP libraries would get truncated JSON. Each replacement takes a
microsecond; ``str.translate`` takes a hundred.
"""

AnswerT = TypeVar("AnswerT", bound="Answer")
AnswerT_co = TypeVar("AnswerT_co", bound="Answer", covariant=True)
ChunkT = TypeVar("ChunkT")
ChunkT_co = TypeVar("ChunkT_co", covariant=True)
AnswerT_contra = TypeVar("AnswerT_contra", bound="Answer", contravariant=True)
ChunkT_contra = TypeVar("ChunkT_contra", contravariant=True)


class Answer(Protocol):
    """Describes a whole answer: a ``ChatCompletionResponse`` or a ``CompletionResponse``."""

    @property
    def id(self) -> str: ...

    @property
    def usage(self) -> Usage: ...


class AnswerStream(Protocol[AnswerT_co, ChunkT_co]):
    """Describes the stream of an answer: a ``ChatStream`` or a ``CompletionStream``."""

    async def __anext__(self) -> ChunkT_co: ...

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def collect(self) -> AnswerT_co: ...

    def response_so_far(self) -> AnswerT_co: ...


class EventWriter(Protocol[AnswerT_contra, ChunkT_contra]):
    """Writes one streamed answer as server-sent events. Each method returns any number of events, including none."""

    def begin(self, answer: AnswerT_contra) -> str:
        """Write the events before the first chunk.

        :param answer: the answer so far, which is empty
        """
        ...

    def chunk(self, chunk: ChunkT_contra) -> str:
        """Write a chunk."""
        ...

    def end(self, answer: AnswerT_contra) -> str:
        """Write the events after the last chunk.

        :param answer: the whole answer
        """
        ...

    def failed(self, problem: Problem) -> str:
        """Write the error that ends the stream."""
        ...


class Call(Protocol[AnswerT, ChunkT]):
    """Describes a parsed request."""

    @property
    def model(self) -> str:
        """Return the name of the model or adapter that the client asks for."""
        ...

    @property
    def label(self) -> str | None:
        """Return the client's label for the end user."""
        ...

    @property
    def is_streamed(self) -> bool:
        """Tell whether the client wants a stream."""
        ...

    @property
    def names(self) -> Mapping[str, str]:
        """Map names of fields in errors to this API's names of these fields."""
        ...

    def with_defaults(self, model: Model) -> Call[AnswerT, ChunkT]:
        """Return the request with the model's defaults for those unset fields that the answer repeats."""
        ...

    def send(self, model: Model, *, adapter: str | None, timeout: float | None) -> AnswerStream[AnswerT, ChunkT]:
        """Send the request to a model.

        :param adapter: the loaded adapter to use
        :param timeout: time limit in seconds
        :raises PagedError: the model refuses the request
        """
        ...

    async def collect(self, model: Model, *, adapter: str | None, timeout: float | None) -> AnswerT:
        """Send the request to a model and return the whole answer. The parameters are those of :meth:`send`.

        :raises PagedError: the model refuses the request, or fails
        """
        ...

    def response(self, answer: AnswerT) -> Mapping[str, Any]:
        """Return a whole answer in the API's form."""
        ...

    def writer(self) -> EventWriter[AnswerT, ChunkT]:
        """Return a writer of the answer's events."""
        ...


@frozen(kw_only=True)
class ChatCall:
    """Holds a parsed chat request; each chat API has a subclass.

    :ivar has_one_call: whether an answer has at most one tool call
    :ivar label: the client's label for the end user
    :ivar names: see :attr:`Call.names`
    """

    model: str
    request: RequestBuilder
    is_streamed: bool = False
    has_one_call: bool = False
    label: str | None = None
    names: Mapping[str, str] = field(factory=dict)

    def with_defaults(self, model: Model) -> Self:
        """Return the request itself: the answers of most APIs repeat no field that may be unset."""
        return self

    def send(self, model: Model, *, adapter: str | None, timeout: float | None) -> ChatStream:
        """Send the request to a model.

        :param adapter: the loaded adapter to use
        :param timeout: time limit in seconds
        :raises PagedError: the model refuses the request
        """
        asked = self.request if adapter is None else self.request.with_adapter(adapter)
        return model.stream_chat_request(asked if timeout is None else asked.with_timeout(timeout))

    async def collect(self, model: Model, *, adapter: str | None, timeout: float | None) -> ChatCompletionResponse:
        """Send the request to a model and return the whole answer. The parameters are those of :meth:`send`.

        :raises PagedError: the model refuses the request, or fails
        """
        return await self.send(model, adapter=adapter, timeout=timeout).collect()


def event(data: Mapping[str, Any], name: str | None = None) -> str:
    """Return a server-sent event.

    :param name: the event's name, in APIs that name events
    """
    text = _ENCODER.encode(data)
    if not text.isascii():
        for end, escaped in _LINE_ENDS:
            text = text.replace(end, escaped)
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"

"""Defines what every API that generates text has in common: what a body asks for, and how its answer is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

from attrs import field, frozen

from paged_sdk import ChatCompletionResponse, ChatStream, Model, RequestBuilder, Usage
from paged_sdk.wire.problem import Problem

__all__ = ["Answer", "AnswerStream", "Call", "ChatCall", "EventWriter", "event"]

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
"""Made once: making one takes as long as writing an event of one token."""

_LINE_ENDS: Final = tuple((end, f"\\u{ord(end):04x}") for end in "\x85\u2028\u2029")
"""JSON may hold them as they are, and events, too. But ``str.splitlines`` cuts there, and with it whoever reads events
line by line by Python's HTTP clients: half of a text's JSON is none. To replace each takes a microsecond, while
``str.translate`` takes a hundred.
"""

AnswerT = TypeVar("AnswerT", bound="Answer")
AnswerT_co = TypeVar("AnswerT_co", bound="Answer", covariant=True)
ChunkT = TypeVar("ChunkT")
ChunkT_co = TypeVar("ChunkT_co", covariant=True)
AnswerT_contra = TypeVar("AnswerT_contra", bound="Answer", contravariant=True)
ChunkT_contra = TypeVar("ChunkT_contra", contravariant=True)


class Answer(Protocol):
    """Is a whole answer of a model's: a ``ChatCompletionResponse`` or a ``CompletionResponse``."""

    @property
    def id(self) -> str: ...

    @property
    def usage(self) -> Usage: ...


class AnswerStream(Protocol[AnswerT_co, ChunkT_co]):
    """Is an answer on its way: a ``ChatStream`` or a ``CompletionStream``."""

    async def __anext__(self) -> ChunkT_co: ...

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def collect(self) -> AnswerT_co: ...

    def response_so_far(self) -> AnswerT_co: ...


class EventWriter(Protocol[AnswerT_contra, ChunkT_contra]):
    """Writes one streamed answer as server-sent events. What it returns may be several events, or none."""

    def begin(self, answer: AnswerT_contra) -> str:
        """Write what comes before the first chunk.

        :param answer: the answer so far, which is empty
        """
        ...

    def chunk(self, chunk: ChunkT_contra) -> str:
        """Write a chunk."""
        ...

    def end(self, answer: AnswerT_contra) -> str:
        """Write what comes after the last chunk.

        :param answer: the whole answer
        """
        ...

    def failed(self, problem: Problem) -> str:
        """Write why no more comes."""
        ...


class Call(Protocol[AnswerT, ChunkT]):
    """Is what one body asks of a model."""

    @property
    def model(self) -> str:
        """Return the name of the model, or of an adapter, that is asked."""
        ...

    @property
    def label(self) -> str | None:
        """Return for whom it is, as the client says."""
        ...

    @property
    def is_streamed(self) -> bool:
        """Tell whether the answer is to come piece by piece."""
        ...

    @property
    def names(self) -> Mapping[str, str]:
        """Return what this body calls fields that another one says the same by, for errors."""
        ...

    def send(self, model: Model, *, adapter: str | None, timeout: float | None) -> AnswerStream[AnswerT, ChunkT]:
        """Ask a model.

        :param adapter: the loaded adapter that the texts go through
        :param timeout: seconds that it may take
        :raises PagedError: the model refuses it
        """
        ...

    async def collect(self, model: Model, *, adapter: str | None, timeout: float | None) -> AnswerT:
        """Ask a model, and return the whole answer. The parameters are those of :meth:`send`.

        :raises PagedError: the model refuses it, or fails
        """
        ...

    def response(self, answer: AnswerT) -> Mapping[str, Any]:
        """Return the whole answer in the API's form."""
        ...

    def writer(self) -> EventWriter[AnswerT, ChunkT]:
        """Return what writes the answer as events."""
        ...


@frozen(kw_only=True)
class ChatCall:
    """Is what a body asks of a model that continues a conversation, whatever the API.

    :ivar has_one_call: whether an answer calls one tool at most
    :ivar label: for whom it is
    :ivar names: see :attr:`Call.names`
    """

    model: str
    request: RequestBuilder
    is_streamed: bool = False
    has_one_call: bool = False
    label: str | None = None
    names: Mapping[str, str] = field(factory=dict)

    def send(self, model: Model, *, adapter: str | None, timeout: float | None) -> ChatStream:
        """Ask a model.

        :param adapter: the loaded adapter that the texts go through
        :param timeout: seconds that it may take
        :raises PagedError: the model refuses it
        """
        asked = self.request if adapter is None else self.request.with_adapter(adapter)
        return model.stream_chat_request(asked if timeout is None else asked.with_timeout(timeout))

    async def collect(self, model: Model, *, adapter: str | None, timeout: float | None) -> ChatCompletionResponse:
        """Ask a model, and return the whole answer. The parameters are those of :meth:`send`.

        :raises PagedError: the model refuses it, or fails
        """
        return await self.send(model, adapter=adapter, timeout=timeout).collect()


def event(data: Mapping[str, Any], name: str | None = None) -> str:
    """Return a server-sent event.

    :param name: the event's, for APIs that name them
    """
    text = _ENCODER.encode(data)
    if not text.isascii():
        for end, escaped in _LINE_ENDS:
            text = text.replace(end, escaped)
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"

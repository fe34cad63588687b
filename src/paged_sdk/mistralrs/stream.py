"""Iterates over the chunks of a response."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol

import paged_sdk
from paged_sdk.mistralrs.chunks import ChatCompletionChunkResponse, chunks_of

__all__ = ["ChatCompletionStream", "ChunkSource"]


class ChunkSource(Protocol):
    """Describes an iterator over the SDK's chunks of one response."""

    def __next__(self) -> paged_sdk.ChatCompletionChunkResponse:
        """Return the next chunk."""
        ...

    def response_so_far(self) -> paged_sdk.ChatCompletionResponse:
        """Return a response made of the chunks read so far."""
        ...

    def close(self) -> None:
        """End the request if it has not ended."""
        ...


class ChatCompletionStream:
    """Iterates over the chunks of one response. Closing or dropping it ends the request; it is a context manager, too.

    :param source: the SDK's chunks
    :param adapter_generation: generation of the adapter used; None: none
    :param when_ended: called once when the stream has ended, however it ends
    """

    def __init__(
        self, source: ChunkSource, *, adapter_generation: str | None, when_ended: Callable[[], object]
    ) -> None:
        self._source = source
        self._generation = adapter_generation
        self._waiting: Iterator[ChatCompletionChunkResponse] = iter(())
        self._finalizer = weakref.finalize(self, when_ended)

    def __iter__(self) -> Iterator[ChatCompletionChunkResponse]:
        return self

    def __next__(self) -> ChatCompletionChunkResponse:
        waiting = next(self._waiting, None)
        if waiting is not None:
            return waiting
        self.read()
        return next(self._waiting)

    def read(self) -> None:
        """Wait for the SDK's next chunk, and store it for the next call of ``__next__``.

        :raises StopIteration: the stream has ended
        """
        try:
            chunk = next(self._source)
        except BaseException:  # StopIteration too
            self._finalizer()
            raise
        stops: dict[int, str | None] = {}
        if any(choice.finish_reason for choice in chunk.choices):
            stops = {choice.index: choice.stop_string for choice in self._source.response_so_far().choices}
        self._waiting = chunks_of(chunk, adapter_generation=self._generation, stops=stops)

    def close(self) -> None:
        """End the request if it has not ended."""
        self._waiting = iter(())
        self._source.close()
        self._finalizer()

    def __enter__(self) -> ChatCompletionStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

"""Iterates over a response in synchronous code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Generic, TypeAlias, TypeVar

from paged_sdk.blocking_loop import BlockingLoop
from paged_sdk.errors import ModelClosedError
from paged_sdk.streaming import ResponseStream
from paged_sdk.system.owner import OfOneProcess
from paged_sdk.types.response import (
    ChatCompletionChunkResponse,
    ChatCompletionResponse,
    CompletionChunkResponse,
    CompletionResponse,
)

__all__ = ["BlockingChatStream", "BlockingCompletionStream", "BlockingStream"]

ResponseT = TypeVar("ResponseT")
ChunkT = TypeVar("ChunkT")


class BlockingStream(OfOneProcess, Generic[ResponseT, ChunkT]):
    """Iterates over the chunks of one response; as a context manager it ends the request on exit."""

    def __init__(self, model: BlockingLoop, stream: ResponseStream[ResponseT, ChunkT]) -> None:
        self._model = model
        self._stream = stream

    def __iter__(self) -> Iterator[ChunkT]:
        return self

    def __next__(self) -> ChunkT:
        try:
            return self._model._call(self._stream.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> BlockingStream[ResponseT, ChunkT]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the request if it has not ended."""
        with suppress(ModelClosedError):  # closing the model has ended the request
            self._model._run(self._stream.aclose)

    def collect(self) -> ResponseT:
        """Read the rest and return the whole response."""
        return self._model._call(self._stream.collect)

    def response_so_far(self) -> ResponseT:
        """Return a response of what has been read."""
        return self._stream.response_so_far()


BlockingChatStream: TypeAlias = BlockingStream[ChatCompletionResponse, ChatCompletionChunkResponse]
BlockingCompletionStream: TypeAlias = BlockingStream[CompletionResponse, CompletionChunkResponse]

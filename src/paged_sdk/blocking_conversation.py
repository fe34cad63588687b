"""Keeps the turns of a chat in synchronous code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike

from paged_sdk.blocking_loop import BlockingLoop
from paged_sdk.blocking_stream import BlockingChatStream, BlockingStream
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.conversation import Conversation
from paged_sdk.system.owner import OfOneProcess
from paged_sdk.types.messages import Message, MessageLike, TextMessages
from paged_sdk.types.request import RequestBuilder
from paged_sdk.types.response import ChatCompletionResponse
from paged_sdk.types.tool import ToolLike

__all__ = ["BlockingConversation"]


class BlockingConversation(OfOneProcess):
    """Wraps a :class:`Conversation` in blocking methods, each of which does what the conversation's method of that name
    does.

    :param model: a :class:`~paged_sdk.BlockingModel`
    :raises InvalidRequestError: as for :class:`Conversation`, which has the other parameters
    """

    def __init__(
        self,
        model: BlockingLoop,
        *,
        system: str | None = None,
        messages: TextMessages | Sequence[MessageLike] = (),
        sampling: SamplingParams | None = None,
        tools: Iterable[ToolLike] = (),
        max_rounds: int = 8,
        tool_timeout: float | None = None,
    ) -> None:
        self._loop = model
        self._conversation = Conversation(
            model._model,
            system=system,
            messages=messages,
            sampling=sampling,
            tools=tools,
            max_rounds=max_rounds,
            tool_timeout=tool_timeout,
        )

    @classmethod
    def load(
        cls, model: BlockingLoop, path: str | PathLike[str], *, tools: Iterable[ToolLike] = ()
    ) -> BlockingConversation:
        """Continue a conversation from a file; see :meth:`Conversation.load`."""
        return cls._of(model, Conversation.load(model._model, path, tools=tools))

    @classmethod
    def _of(cls, model: BlockingLoop, conversation: Conversation) -> BlockingConversation:
        wrapped = cls.__new__(cls)
        wrapped._loop, wrapped._conversation = model, conversation
        return wrapped

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the turns so far."""
        return self._conversation.messages

    def send(self, text: str) -> ChatCompletionResponse:
        """Send a user turn and return the answer; see :meth:`Conversation.send`."""
        return self._loop._call(self._conversation.send, text)

    def stream(self, text: str) -> BlockingChatStream:
        """Send a user turn and stream the answer; see :meth:`Conversation.stream`."""
        return BlockingStream(self._loop, self._conversation.stream(text))

    def continue_answer(self) -> ChatCompletionResponse:
        """Continue the last answer; see :meth:`Conversation.continue_answer`."""
        return self._loop._call(self._conversation.continue_answer)

    def stream_continued_answer(self) -> BlockingChatStream:
        """Stream what :meth:`continue_answer` returns; see :meth:`Conversation.stream_continued_answer`."""
        return BlockingStream(self._loop, self._conversation.stream_continued_answer())

    def request(self, text: str) -> RequestBuilder:
        """Return the request that :meth:`send` would make."""
        return self._conversation.request(text)

    def add_turn(self, text: str, answer: str) -> None:
        """Add a user turn and its answer to the conversation."""
        self._conversation.add_turn(text, answer)

    def fork(self) -> BlockingConversation:
        """Return a second conversation with the same turns and settings; see :meth:`Conversation.fork`."""
        return self._of(self._loop, self._conversation.fork())

    def save(self, path: str | PathLike[str]) -> None:
        """Write the conversation to a file; see :meth:`Conversation.save`."""
        self._conversation.save(path)

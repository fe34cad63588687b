"""Keeps the turns of a chat with a model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Protocol

from attrs import evolve

from paged_sdk.calls.generation_requests import ChatStream
from paged_sdk.calls.tool_loop import ToolRun, check_tool_limits
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.errors import InvalidRequestError
from paged_sdk.saved_conversation import SavedConversation
from paged_sdk.types.messages import Message, MessageLike, TextMessageRole, TextMessages
from paged_sdk.types.request import ChatRequestLike, RequestBuilder
from paged_sdk.types.response import ChatCompletionResponse
from paged_sdk.types.tool import ToolLike, as_tools

__all__ = ["Conversation"]


class _ChatModel(Protocol):
    """Lists the methods used of a :class:`~paged_sdk.Model`."""

    def stream_chat_request(self, request: ChatRequestLike) -> ChatStream: ...

    async def send_chat_with_tools(
        self, request: ChatRequestLike, *, max_rounds: int = ..., tool_timeout: float | None = ...
    ) -> ToolRun: ...


class Conversation:
    """Keeps the turns of a chat with one model. Each request contains the whole conversation, and the prefix cache
    keeps its KV.

    :param model: a :class:`~paged_sdk.Model`
    :param system: the system message, if any
    :param messages: turns that the conversation begins with, after ``system``; they may contain images
    :param sampling: how to sample the answers; None is greedy
    :param tools: typed functions that :meth:`send` runs when the model calls them; their turns become part of the
        conversation. See :meth:`Model.send_chat_with_tools`
    :param max_rounds: the maximum number of rounds of tool calls per turn
    :param tool_timeout: the maximum number of seconds per tool call; None: no limit
    :raises InvalidRequestError: a malformed message, tool or limit, or a RequestBuilder, whose options are of one
        request
    """

    def __init__(
        self,
        model: _ChatModel,
        *,
        system: str | None = None,
        messages: TextMessages | Sequence[MessageLike] = (),
        sampling: SamplingParams | None = None,
        tools: Iterable[ToolLike] = (),
        max_rounds: int = 8,
        tool_timeout: float | None = None,
    ) -> None:
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise InvalidRequestError.of("sampling", sampling, "SamplingParams or None")
        check_tool_limits(max_rounds, tool_timeout)
        self._model = model
        self._sampling = sampling
        self._tools = as_tools(tools)
        self._max_rounds = max_rounds
        self._tool_timeout = tool_timeout
        self._messages = TextMessages()
        if system is not None:
            self._messages = self._messages.add_message(TextMessageRole.SYSTEM, system)
        if isinstance(messages, RequestBuilder):
            raise InvalidRequestError.of("messages", messages, "TextMessages, VisionMessages or a list of messages")
        self._messages = self._messages.add_messages(*TextMessages(messages).messages)

    @classmethod
    def load(cls, model: _ChatModel, path: str | PathLike[str], *, tools: Iterable[ToolLike] = ()) -> Conversation:
        """Continue a conversation that :meth:`save` has written, perhaps with another model.

        :param tools: the functions of the conversation's tools, and others; a file has only their names
        :raises ConfigError: the file cannot be read, something in it is not as written, or a tool is missing
        :raises InvalidRequestError: a malformed tool
        """
        saved, given = SavedConversation.read(path), as_tools(tools)
        saved.check_tools(path, {tool.name for tool in given})
        return cls(
            model,
            messages=saved.messages,
            sampling=saved.sampling,
            tools=given,
            max_rounds=saved.max_rounds,
            tool_timeout=saved.tool_timeout,
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the conversation to a file: all turns with their images, reasoning and calls, how to sample, and the
        names of the tools. A file of that name is replaced, once the new one is complete.

        :raises ConfigError: the path cannot be written, or the file would be longer than 64 MiB
        """
        SavedConversation(
            messages=self.messages,
            sampling=self._sampling,
            tools=tuple(tool.name for tool in self._tools),
            max_rounds=self._max_rounds,
            tool_timeout=self._tool_timeout,
        ).write(path)

    def fork(self) -> Conversation:
        """Return a second conversation with the same turns and settings. Later turns of one do not affect the other;
        both find the KV of their common turns in the prefix cache.
        """
        return copy.copy(self)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the turns so far."""
        return self._messages.messages

    async def send(self, text: str) -> ChatCompletionResponse:
        """Send a user turn and return the answer. Both become part of the conversation once the answer is complete.

        :raises RequestError: the request failed; the conversation does not change
        """
        if not self._tools:
            return await self.stream(text).collect()
        run = await self._model.send_chat_with_tools(
            self.request(text), max_rounds=self._max_rounds, tool_timeout=self._tool_timeout
        )
        if run.response.choices[0].finish_reason != "canceled":  # the model was closed before the answer's end
            self._keep(text, *run.messages)
        return run.response

    def stream(self, text: str) -> ChatStream:
        """Send a user turn and stream the answer. Both become part of the conversation once its end has been read.

        A stream that fails or is left early does not change the conversation; :meth:`add_turn` can keep the partial
        answer.

        :raises InvalidRequestError: the conversation has tools, which only :meth:`send` runs
        """
        if self._tools:
            raise InvalidRequestError(
                "a conversation with tools cannot be streamed: use send, or RequestBuilder.with_tools and "
                "Model.stream_chat_request",
                field="tools",
            )
        stream = self._model.stream_chat_request(self.request(text))
        stream.when_whole(lambda response: self._keep(text, Message.parse(response.choices[0].message)))
        return stream

    async def continue_answer(self) -> ChatCompletionResponse:
        """Continue the last answer, for example after finish reason "length", and return the continuation. The
        conversation then holds both as one turn. Tools are not called here.

        :raises InvalidRequestError: the last turn is not the assistant's, or has no text to continue
        :raises RequestError: the request failed; the conversation does not change
        """
        return await self.stream_continued_answer().collect()

    def stream_continued_answer(self) -> ChatStream:
        """Stream what :meth:`continue_answer` returns. A stream that fails or is left early does not change the
        conversation.

        :raises InvalidRequestError: as for :meth:`continue_answer`
        """
        place = len(self.messages) - 1
        builder = self._sampled(RequestBuilder.from_messages(self._messages))
        stream = self._model.stream_chat_request(builder.with_continue_final_message())
        stream.when_whole(lambda response: self._extend(place, response.choices[0].message.content))
        return stream

    def request(self, text: str) -> RequestBuilder:
        """Return the request that :meth:`send` would make."""
        builder = self._sampled(RequestBuilder.from_messages(self._messages).add_message(TextMessageRole.USER, text))
        return builder.with_tools(self._tools) if self._tools else builder

    def add_turn(self, text: str, answer: str) -> None:
        """Add a user turn and its answer to the conversation."""
        self._keep(text, Message(TextMessageRole.ASSISTANT, answer))

    def _keep(self, text: str, *answers: Message) -> None:
        self._messages = self._messages.add_message(TextMessageRole.USER, text).add_messages(*answers)

    def _extend(self, place: int, text: str) -> None:
        turns = list(self.messages)
        turns[place] = evolve(turns[place], content=turns[place].content + text)
        self._messages = TextMessages(turns)

    def _sampled(self, request: RequestBuilder) -> RequestBuilder:
        return request if self._sampling is None else request.with_sampling(self._sampling)

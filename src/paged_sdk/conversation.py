"""Keeps the turns of a chat with a model."""

from __future__ import annotations

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.model import ChatStream, Model
from paged_sdk.types.messages import Message, TextMessageRole, TextMessages
from paged_sdk.types.request import RequestBuilder
from paged_sdk.types.response import ChatCompletionResponse

__all__ = ["Conversation"]


class Conversation:
    """Keeps the turns with one model; each request sends the whole conversation, whose KV the prefix cache keeps.

    :param system: the system message, if any
    :param sampling: how to sample the answers; None is greedy
    """

    def __init__(self, model: Model, *, system: str | None = None, sampling: SamplingParams | None = None) -> None:
        self._model = model
        self._sampling = sampling
        self._messages = TextMessages()
        if system is not None:
            self._messages = self._messages.add_message(TextMessageRole.SYSTEM, system)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the turns so far."""
        return self._messages.messages

    async def send(self, text: str) -> ChatCompletionResponse:
        """Send a user turn and return the answer; both become part of the conversation once the answer is whole.

        :raises RequestError: the request failed; the conversation does not change
        """
        return await self.stream(text).collect()

    def stream(self, text: str) -> ChatStream:
        """Send a user turn and stream the answer; both become part of the conversation once its end has been read.

        A stream that fails, or that is left before its end, does not change the conversation. What was said until then
        can be kept with :meth:`add_turn`.
        """
        stream = self._model.stream_chat_request(self.request(text))
        stream.when_whole(lambda response: self._keep(text, Message.parse(response.choices[0].message)))
        return stream

    def request(self, text: str) -> RequestBuilder:
        """Return the request that :meth:`send` would make."""
        builder = RequestBuilder.from_messages(self._messages).add_message(TextMessageRole.USER, text)
        return builder if self._sampling is None else builder.with_sampling(self._sampling)

    def add_turn(self, text: str, answer: str) -> None:
        """Add a user turn and its answer to the conversation."""
        self._keep(text, Message(TextMessageRole.ASSISTANT, answer))

    def _keep(self, text: str, answer: Message) -> None:
        self._messages = self._messages.add_message(TextMessageRole.USER, text).add_messages(answer)

"""Hold chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TypeAlias

from attrs import evolve, frozen

from paged_sdk.errors import InvalidRequestError

__all__ = ["Message", "MessageLike", "TextMessageRole", "TextMessages", "parse_messages"]


class TextMessageRole(Enum):
    """Says who speaks.

    OpenAI's newer name for instructions is "developer". Templates that do not know it get such messages as "system".
    """

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"

    @classmethod
    def parse(cls, value: object) -> TextMessageRole:
        """Return a role, given as itself or by its name.

        :raises InvalidRequestError: naming the roles there are
        """
        if isinstance(value, cls):
            return value
        try:
            return cls(value)
        except ValueError:
            allowed = ", ".join(repr(role.value) for role in cls)
            raise InvalidRequestError.of("role", value, f"one of {allowed}") from None


@frozen
class Message:
    """Holds one turn of a conversation.

    :ivar role: who speaks
    :ivar content: the text
    """

    role: TextMessageRole
    content: str

    @classmethod
    def parse(cls, value: object) -> Message:
        """Read a message, given as itself or as an OpenAI-style mapping ``{"role": ..., "content": ...}``.

        :raises InvalidRequestError: if a key is missing or has the wrong kind of value
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidRequestError.of("message", value, 'a mapping with "role" and "content"')
        if "role" not in value:
            raise InvalidRequestError.of("message", dict(value), 'a mapping with "role" and "content"')
        role, content = TextMessageRole.parse(value["role"]), value.get("content")
        # OpenAI's API has null for a turn of the model's that holds no text.
        return cls(role, "" if content is None and role is TextMessageRole.ASSISTANT else _text(content))


def _text(content: object) -> str:
    """Return the text of a message's content: a string, or a list of OpenAI-style text parts."""
    if isinstance(content, str):
        return content
    allowed = 'a string or a list of {"type": "text", "text": ...} parts'
    if not isinstance(content, Sequence):
        raise InvalidRequestError.of("content", content, allowed)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequestError.of("content", content, allowed)
        texts.append(text)
    return "".join(texts)


@frozen
class TextMessages:
    """Holds a conversation; every ``add_message`` returns a new one. A request of bare messages is greedy."""

    messages: tuple[Message, ...] = ()

    def add_message(self, role: TextMessageRole | str, content: str) -> TextMessages:
        """Return the conversation with one more turn.

        :raises InvalidRequestError: for an unknown role
        """
        message = Message.parse({"role": role, "content": content})
        return evolve(self, messages=(*self.messages, message))


MessageLike: TypeAlias = Message | Mapping[str, object]


def parse_messages(messages: Sequence[MessageLike]) -> tuple[Message, ...]:
    """Read and check messages in any accepted form.

    :raises InvalidRequestError: for none at all, an unknown role or a malformed message
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequestError.of("messages", messages, "TextMessages, RequestBuilder or a list of messages")
    if not messages:
        raise InvalidRequestError.of("messages", [], "at least one message")
    return tuple(Message.parse(message) for message in messages)

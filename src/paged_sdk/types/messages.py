"""Hold chat messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Self, TypeAlias

from attrs import Attribute, evolve, field, fields_dict, frozen

from paged_sdk.errors import InvalidRequestError
from paged_sdk.types.image import Image, ImageLike, image_of_part
from paged_sdk.types.response import ResponseMessage
from paged_sdk.types.tool_call import ToolCall, check_unicode, refuse_other_keys

__all__ = [
    "Message",
    "MessageLike",
    "MessageList",
    "TextMessageRole",
    "TextMessages",
    "VisionMessages",
    "parse_messages",
]


class TextMessageRole(Enum):
    """Names the author of a message.

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

        :raises InvalidRequestError: an unknown role; the error names the known ones
        """
        if isinstance(value, cls):
            return value
        named = {role.value: role for role in cls}
        found = named.get(value) if isinstance(value, str) else None
        if found is None:
            raise InvalidRequestError.of("role", value, "one of " + ", ".join(map(repr, named)))
        return found


def _role(value: TextMessageRole | str) -> TextMessageRole:
    return TextMessageRole.parse(value)


def _content(value: str | Sequence[Mapping[str, object]]) -> str:
    """Return the text of a message's content: a string, or a list of OpenAI-style parts."""
    if isinstance(value, str):
        return check_unicode("content", value)
    parts = _parts(value)
    if any(isinstance(part, Image) for part in parts):
        raise InvalidRequestError.of("content", value, "texts: Message.of_parts takes images, too")
    return check_unicode("content", _text_of(parts))


def _text_of(parts: Iterable[str | Image]) -> str:
    return "".join(part for part in parts if isinstance(part, str))


def _parts(value: object) -> tuple[str | Image, ...]:
    """Return the texts and images of a message's content in parts."""
    allowed = 'a string, or a list of {"type": "text", "text": ...} and {"type": "image_url", "image_url": ...} parts'
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise InvalidRequestError.of("content", value, allowed)
    parts: list[str | Image] = []
    for part in value:
        if isinstance(part, Image):
            parts.append(part)
            continue
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        image = image_of_part(part) if isinstance(part, Mapping) and text is None else None
        if image is None and not isinstance(text, str):
            raise InvalidRequestError.of("content", value, allowed)
        parts.append(text if isinstance(text, str) else image)  # type: ignore[arg-type]  # not both are None
    return tuple(parts)


def _optional_text(instance: object, attribute: Attribute[Any], value: object) -> None:
    if value is not None and not (isinstance(value, str) and value):
        raise InvalidRequestError.of(attribute.name, value, "a non-empty string or None")
    if value is not None:
        check_unicode(attribute.name, value)


def _tool_calls(value: Iterable[ToolCall | Mapping[str, object]] | None) -> tuple[ToolCall, ...]:
    calls = () if value is None else value
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Iterable):
        raise InvalidRequestError.of("tool_calls", value, "a list of calls")
    return tuple(map(ToolCall.parse, calls))


@frozen
class Message:
    """Holds one turn of a conversation.

    All of it is passed to the chat template, which may not use all of it.

    :ivar role: the author
    :ivar content: the text; of a content in parts, all texts together
    :ivar parts: texts and images, in order; empty if the content is only text
    :ivar name: the name of the author, or of the tool that answers
    :ivar tool_calls: an assistant turn's calls of tools
    :ivar tool_call_id: the call that a tool's turn answers
    :ivar reasoning_content: an assistant's reasoning before its text
    :raises InvalidRequestError: an unknown role, a value of the wrong kind, or a field that the role does not have
    """

    role: TextMessageRole = field(converter=_role)
    content: str = field(converter=_content)
    parts: tuple[str | Image, ...] = field(default=(), kw_only=True)
    name: str | None = field(default=None, validator=_optional_text, kw_only=True)
    tool_calls: tuple[ToolCall, ...] = field(default=(), converter=_tool_calls, kw_only=True)
    tool_call_id: str | None = field(default=None, validator=_optional_text, kw_only=True)
    reasoning_content: str | None = field(default=None, validator=_optional_text, kw_only=True)

    def __attrs_post_init__(self) -> None:
        owners = {
            "tool_calls": TextMessageRole.ASSISTANT,
            "reasoning_content": TextMessageRole.ASSISTANT,
            "tool_call_id": TextMessageRole.TOOL,
        }
        for name, owner in owners.items():
            if getattr(self, name) and self.role is not owner:
                raise InvalidRequestError.of(
                    name,
                    getattr(self, name),
                    f"nothing in a message of role {self.role.value!r}: it is {owner.value}'s",
                )

    @parts.validator
    def _are_the_content(self, attribute: object, value: object) -> None:
        fits = type(value) is tuple and all(isinstance(part, str | Image) for part in value)
        if not fits or (self.parts and _text_of(self.parts) != self.content):
            raise InvalidRequestError.of("parts", value, "a tuple of texts and images, the texts those of the content")

    @property
    def images(self) -> tuple[Image, ...]:
        """Return the images, in order."""
        return tuple(part for part in self.parts if isinstance(part, Image))

    @classmethod
    def of_parts(cls, role: TextMessageRole | str, content: object, **rest: Any) -> Message:
        """Make a message whose content may be in parts: texts, images, and OpenAI-style mappings of either.

        :param content: a string, or a list of parts
        :param rest: the other fields
        :raises InvalidRequestError: for an unknown role, or a part of the wrong kind
        """
        if content is None or isinstance(content, str):
            return cls(role, content, **rest)  # type: ignore[arg-type]  # None is refused there
        parts = _parts(content)
        has_images = any(isinstance(part, Image) for part in parts)
        return cls(role, _text_of(parts), parts=parts if has_images else (), **rest)

    @classmethod
    def parse(cls, value: object) -> Message:
        """Read a message, given as itself, as a response's message, or as an OpenAI-style mapping ``{"role": ...,
        "content": ...}``.

        Keys with empty values, such as ``"refusal": None``, are accepted, and so is ``parsed``, which OpenAI's client
        adds.

        :raises InvalidRequestError: if a key is missing, unknown, or has the wrong kind of value
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, ResponseMessage):
            return cls(
                value.role,
                value.content,
                tool_calls=[
                    ToolCall(call.function.name, call.function.parse_arguments(), call.id) for call in value.tool_calls
                ],
                reasoning_content=value.reasoning_content,
            )
        if not isinstance(value, Mapping) or "role" not in value:
            raise InvalidRequestError.of("message", value, 'a mapping with "role" and "content"')
        given = {key: part for key, part in value.items() if key in _MESSAGE_KEYS}
        refuse_other_keys("message", value, _MESSAGE_KEYS, repeated=("parsed",))
        if given.get("reasoning_content") == "":  # from joining a stream's deltas without reasoning
            del given["reasoning_content"]
        # OpenAI's API has null content for an assistant message without text.
        if given.get("content") is None and TextMessageRole.parse(given["role"]) is TextMessageRole.ASSISTANT:
            given["content"] = ""
        return cls.of_parts(given.pop("role"), given.pop("content", None), **given)

    def to_dict(self) -> dict[str, Any]:
        """Return the message as passed to the chat template: role, content, and whichever other fields are set."""
        message: dict[str, Any] = {"role": self.role.value, "content": self.content}
        if self.parts:
            message["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in self.parts
            ]
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        return message


_MESSAGE_KEYS = tuple(name for name in fields_dict(Message) if name != "parts")


def _messages(value: TextMessages | Sequence[MessageLike]) -> tuple[Message, ...]:
    if isinstance(value, TextMessages):
        return value.messages
    return () if isinstance(value, list | tuple) and not value else parse_messages(value)


@frozen
class MessageList:
    """Holds the turns of a conversation; every ``add_message`` returns a copy with one more."""

    messages: tuple[Message, ...] = field(default=(), converter=_messages)

    def add_message(
        self,
        role: TextMessageRole | str,
        content: str | Sequence[Mapping[str, object]],
        *,
        name: str | None = None,
        tool_calls: Iterable[ToolCall | Mapping[str, object]] | None = (),
        tool_call_id: str | None = None,
    ) -> Self:
        """Return a copy with one more turn; the parameters are those of :class:`Message`.

        :param content: a string, or a list of OpenAI-style parts, images included
        :raises InvalidRequestError: for an unknown role, or a value of the wrong kind
        """
        rest = {"name": name, "tool_calls": tool_calls, "tool_call_id": tool_call_id}
        return self.add_messages(Message.of_parts(role, content, **rest))

    def add_image_message(
        self, role: TextMessageRole | str, text: str, images: ImageLike | Sequence[ImageLike]
    ) -> Self:
        """Return a copy with one more turn: images, followed by a text.

        :param images: one or several, each a PIL image, a path, the bytes of an image file, a ``data:`` URL or a numpy
            array of uint8 (:meth:`Image.parse`)
        :raises InvalidRequestError: for an unknown role, no image, or something that is not an image
        """
        given: list[Any] = list(images) if isinstance(images, list | tuple) else [images]
        if not given:
            raise InvalidRequestError.of("images", images, "at least one image")
        if not isinstance(text, str):
            raise InvalidRequestError.of("text", text, "a string")
        parts: list[str | Image] = list(map(Image.parse, given))
        if text:
            parts.append(text)
        return self.add_messages(Message(role, text, parts=tuple(parts)))

    def add_messages(self, *messages: MessageLike) -> Self:
        """Return a copy with more turns: each a :class:`Message`, a response's message, or an OpenAI-style mapping.

        :raises InvalidRequestError: for a malformed message
        """
        return evolve(self, messages=(*self.messages, *map(Message.parse, messages)))


@frozen
class TextMessages(MessageList):
    """Holds a conversation. As a request, it is answered greedily."""


@frozen
class VisionMessages(TextMessages):
    """Holds a conversation with images. As a request, it is answered greedily."""


MessageLike: TypeAlias = Message | ResponseMessage | Mapping[str, object]


def parse_messages(messages: Sequence[MessageLike]) -> tuple[Message, ...]:
    """Read and check messages in any accepted form.

    :raises InvalidRequestError: for none at all, an unknown role or a malformed message
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        allowed = 'TextMessages, RequestBuilder or a list of messages, such as [{"role": "user", "content": "Hello!"}]'
        raise InvalidRequestError.of("messages", messages, allowed)
    if not messages:
        raise InvalidRequestError.of("messages", [], "at least one message")
    if len(messages) == 1:
        return (Message.parse(messages[0]),)
    return tuple(_parse_at(place, message) for place, message in enumerate(messages))


def _parse_at(place: int, value: MessageLike) -> Message:
    """Read one of several messages."""
    try:
        return Message.parse(value)
    except InvalidRequestError as error:
        name, rest = f"messages[{place}]", error.field.removeprefix("message")
        field = name + rest if rest.startswith("[") or not rest else f"{name}.{error.field}"
        said = str(error)
        message = field + said.removeprefix(error.field) if said.startswith(error.field) else f"{field}: {said}"
        raise InvalidRequestError(message, field=field, value=error.value, allowed=error.allowed) from error.__cause__

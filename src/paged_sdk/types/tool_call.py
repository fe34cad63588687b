"""Hold a tool call that a model has made, as part of a message."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

from attrs import Attribute, field, frozen

from paged_sdk.config.checks import is_unicode
from paged_sdk.errors import InvalidRequestError

__all__ = ["ToolCall", "check_unicode", "json_object", "refuse_other_keys"]

MAX_DEPTH = 32
"""Most levels of nesting in arguments: far more than any tool needs."""


def _is_text(instance: object, attribute: Attribute[Any], value: object) -> None:
    if not (isinstance(value, str) and value) and not (value is None and attribute.name == "id"):
        raise InvalidRequestError.of(f"tool_calls.{attribute.name}", value, "a non-empty string")
    if value is not None:
        check_unicode(f"tool_calls.{attribute.name}", value)


def _arguments(value: Mapping[str, object] | str) -> dict[str, Any] | str:
    if isinstance(value, str):
        return check_unicode("tool_calls.arguments", value)
    return json_object("tool_calls.arguments", value, "an object of JSON values, or JSON text")


def check_unicode(name: str, text: str) -> str:
    """Return a text as a plain ``str``, if it can be tokenized.

    :raises InvalidRequestError: it has lone surrogates
    """
    plain = str.__str__(text)
    if not is_unicode(plain):
        raise InvalidRequestError.of(name, plain, "Unicode without lone surrogates")
    return plain


def json_object(name: str, value: object, allowed: str = "an object of JSON values") -> dict[str, Any]:
    """Return a copy of a JSON object in Python's own types.

    :raises InvalidRequestError: it is not an object, has other values than JSON's, or is nested too deep
    """
    if not isinstance(value, Mapping):
        raise InvalidRequestError.of(name, value, allowed)
    copy: dict[str, Any] = _json_value(name, value, MAX_DEPTH)
    return copy


def _json_value(name: str, value: object, depth: int) -> Any:
    """Return a copy of a JSON value in Python's own types, so that a template gets no other objects."""
    if isinstance(value, str):
        return check_unicode(name, value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {check_unicode(name, key): _json_value(name, part, depth - 1) for key, part in value.items()}
    if depth and isinstance(value, list | tuple):
        return [_json_value(name, part, depth - 1) for part in value]
    allowed = f"strings, finite numbers, booleans, null, lists and objects of them, {MAX_DEPTH} deep at most"
    raise InvalidRequestError.of(name, value, allowed)


@frozen
class ToolCall:
    """Holds a tool call.

    :ivar name: the tool's name
    :ivar arguments: an object of JSON values, or JSON text. Which of them a template expects differs: those of Hugging
        Face write objects out themselves, and quote a text.
    :ivar id: what the tool's answer refers to
    :raises InvalidRequestError: for a value of the wrong kind
    """

    name: str = field(validator=_is_text)
    arguments: Mapping[str, object] | str = field(converter=_arguments, hash=False)
    id: str | None = field(default=None, validator=_is_text)

    @classmethod
    def parse(cls, value: object) -> ToolCall:
        """Read a call, given as itself or in OpenAI's form ``{"id": ..., "type": "function", "function": {"name": ...,
        "arguments": ...}}``.

        Keys that OpenAI's client adds are accepted: ``index``, a call's place in a stream, and ``parsed_arguments``.

        :raises InvalidRequestError: if a key is missing, unknown, or has the wrong kind of value
        """
        if isinstance(value, cls):
            return value
        function = value.get("function") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(function, Mapping):
            allowed = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
            raise InvalidRequestError.of("tool_calls", value, allowed)
        refuse_other_keys("tool_calls", value, ("id", "type", "function"), repeated=("index",))
        refuse_other_keys("tool_calls.function", function, ("name", "arguments"), repeated=("parsed_arguments",))
        if value.get("type") not in (None, "function"):
            raise InvalidRequestError.of("tool_calls.type", value["type"], '"function"')
        return cls(function.get("name"), function.get("arguments"), value.get("id"))  # type: ignore[arg-type]  # checked there

    def to_dict(self) -> dict[str, Any]:
        """Return the call in OpenAI's form, as passed to the chat template."""
        call: dict[str, Any] = {} if self.id is None else {"id": self.id}
        return call | {"type": "function", "function": {"name": self.name, "arguments": deepcopy(self.arguments)}}


def refuse_other_keys(
    name: str, value: Mapping[Any, object], known: Collection[str], *, repeated: Collection[str] = ()
) -> None:
    """Check that a mapping has values only under known keys, so that nothing is silently ignored.

    Null and empty values are allowed under any key: OpenAI's client writes every field that a message may have.

    :param repeated: keys that are ignored, because they repeat what other keys hold
    :raises InvalidRequestError: naming the first other key with a value
    """
    for key, part in value.items():
        empty = part is None or (isinstance(part, str | list | tuple | Mapping) and not part)
        if key not in known and key not in repeated and not empty:
            raise InvalidRequestError.of(f"{name}[{key!r}]"[:100], part, f"no key but {', '.join(known)}")

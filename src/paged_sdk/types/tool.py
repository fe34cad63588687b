"""Hold the tools that a model may call, and the tool choice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, Final, TypeAlias

from attrs import Attribute, field, frozen

from paged_sdk.errors import InvalidRequestError
from paged_sdk.types.function_schema import describe_function
from paged_sdk.types.tool_call import check_unicode, json_object, refuse_other_keys

__all__ = [
    "MAX_TOOLS",
    "MAX_TOOLS_CHARS",
    "Tool",
    "ToolChoice",
    "ToolLike",
    "as_tool_choice",
    "as_tools",
]

MAX_TOOLS: Final = 256
MAX_TOOLS_CHARS: Final = 1 << 18
"""Most characters of all tools together: they are all in the prompt, about 65,000 tokens."""
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
"""OpenAI allows 64 characters and no dots; tool servers use longer names and dots."""

ToolChoice: TypeAlias = str | Mapping[str, Any]
"""Says whether tools are called: "auto": the model decides; "none": the model does not see them; "required": it has to
call one; the name of a tool, or OpenAI's form of it: it has to call that one.
"""


def _name(instance: object, attribute: Attribute[Any], value: object) -> None:
    if not (isinstance(value, str) and _NAME.fullmatch(value)):
        raise InvalidRequestError.of("tools.name", value, "1 to 128 letters, digits, _, - and ., as tools' names are")


def _text(instance: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, str):
        raise InvalidRequestError.of("tools.description", value, "a string")
    check_unicode("tools.description", value)


def _callable(instance: object, attribute: Attribute[Any], value: object) -> None:
    if value is not None and not callable(value):
        raise InvalidRequestError.of("tools.function", value, "a function or None")


def _switch(instance: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError.of("tools.strict", value, "True or False")


def _schema(value: object) -> dict[str, Any]:
    schema = json_object("tools.parameters", value)
    if schema and schema.get("type") != "object":
        raise InvalidRequestError.of("tools.parameters", value, 'a JSON schema of an object: {"type": "object", ...}')
    return schema or {"type": "object", "properties": {}}


@frozen(kw_only=True)
class Tool:
    """Describes a tool that a model may call.

    :ivar name: 1 to 128 letters, digits, underscores, hyphens and dots
    :ivar description: tells the model what it does
    :ivar parameters: JSON schema of the object that holds the arguments
    :ivar strict: enforce the schemas of all calls in a request with such a tool, even if the model is free to make
        none; the model is not told
    :ivar function: what :meth:`Model.send_chat_with_tools` calls; None: the application runs the tool
    :raises InvalidRequestError: for a value of the wrong kind
    """

    name: str = field(validator=_name)
    description: str = field(default="", validator=_text)
    parameters: Mapping[str, Any] = field(factory=dict, converter=_schema, hash=False)
    function: Callable[..., Any] | None = field(default=None, validator=_callable)
    strict: bool = field(default=False, validator=_switch)

    @classmethod
    def from_function(
        cls,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        strict: bool = False,
    ) -> Tool:
        """Describe a function by its signature and docstring.

        Every parameter has a type annotation: int, float, str, bool, None, Any, Literal, Enum, datetime, date, time,
        UUID, Decimal, list, tuple, dict, unions, dataclasses, attrs classes and TypedDicts of these. The docstring
        describes the function, and its parameters after ``:param city:`` or in an ``Args:`` section;
        ``Annotated[str, "..."]`` describes a parameter too.

        :param name: its name for the model, if not its own
        :param description: its description, if not the docstring's
        :param strict: whether to enforce the parameters' types in calls
        :raises InvalidRequestError: a parameter that cannot be described to the model, by name
        """
        found = describe_function(function)
        return cls(
            name=found.name if name is None else name,
            description=found.description if description is None else description,
            parameters=found.parameters,
            function=function,
            strict=strict,
        )

    @classmethod
    def parse(cls, value: object) -> Tool:
        """Read a tool, given as itself, as a typed function, or in OpenAI's form ``{"type": "function", "function":
        {"name": ..., "description": ..., "parameters": ...}}``.

        :raises InvalidRequestError: if it is none of these, or has an unknown key
        """
        if isinstance(value, cls):
            return value
        if callable(value):
            return cls.from_function(value)
        function = value.get("function") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(function, Mapping):
            allowed = 'a Tool, a typed function, or {"type": "function", "function": {"name": ..., "parameters": ...}}'
            raise InvalidRequestError.of("tools", value, allowed)
        refuse_other_keys("tools", value, ("type", "function"))
        refuse_other_keys("tools.function", function, ("name", "description", "parameters", "strict"))
        if value.get("type", "function") != "function":
            raise InvalidRequestError.of("tools.type", value["type"], '"function"')
        description, parameters = function.get("description"), function.get("parameters")
        return cls(
            name=function.get("name"),  # type: ignore[arg-type]  # checked there
            description="" if description is None else description,
            parameters={} if parameters is None else parameters,
            strict=False if function.get("strict") is None else function["strict"],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form, as passed to the chat template."""
        function = {"name": self.name, "description": self.description, "parameters": deepcopy(self.parameters)}
        return {"type": "function", "function": function}


ToolLike: TypeAlias = Tool | Callable[..., Any] | Mapping[str, Any]


def as_tools(value: Iterable[ToolLike]) -> tuple[Tool, ...]:
    """Read tools, each in any accepted form.

    :raises InvalidRequestError: one is malformed, two have the same name, or they are too many or too large
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequestError.of("tools", value, "a list of tools")
    tools = []
    names: set[str] = set()
    size = 0
    for each in value:
        tool = Tool.parse(each)
        if tool.name in names:
            raise InvalidRequestError.of("tools", tool.name, "names that no other tool of the request has")
        names.add(tool.name)
        tools.append(tool)
        size += len(json.dumps(tool.to_dict(), ensure_ascii=False))
        if len(tools) > MAX_TOOLS or size > MAX_TOOLS_CHARS:
            raise InvalidRequestError(
                f"tools are too many or too large: expected at most {MAX_TOOLS}, of {MAX_TOOLS_CHARS} characters "
                "together",
                field="tools",
                allowed=f"at most {MAX_TOOLS} tools of {MAX_TOOLS_CHARS} characters together",
            )
    return tuple(tools)


def as_tool_choice(value: object, tools: Iterable[Tool]) -> str:
    """Return the tool choice: "auto", "none", "required" or the name of a tool.

    :raises InvalidRequestError: it is none of these
    """
    function = value.get("function") if isinstance(value, Mapping) else None
    named = function.get("name") if isinstance(function, Mapping) else value
    names = [tool.name for tool in tools]
    if isinstance(named, str) and (named in names or named in ("auto", "none") or (named == "required" and names)):
        return named
    allowed = f'"auto", "none", "required" or one of {", ".join(names)}' if names else '"auto" or "none" without tools'
    raise InvalidRequestError.of("tool_choice", value, allowed)

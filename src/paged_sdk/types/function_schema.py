"""Describe the parameters of a Python function as a JSON schema, from its signature and docstring."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, ClassVar, Final, Literal, Union, get_args, get_origin

import attrs

from paged_sdk.errors import InvalidRequestError, shortened
from paged_sdk.types.scalar_types import SCALAR_TYPES, scalar_type

__all__ = ["FunctionSchema", "arguments_of", "describe_function", "describe_type", "required_keys"]

_MAX_DEPTH: Final = 16
_ALLOWED: Final = (
    ", ".join(each.name for each in SCALAR_TYPES.values())
    + ", Any, Literal, Enum, list, tuple, dict[str, ...], unions, dataclasses, attrs classes and TypedDicts of these"
)


@attrs.frozen
class FunctionSchema:
    """Holds the description of a function for a model.

    :ivar parameters: JSON schema of an object
    """

    name: str
    description: str
    parameters: dict[str, Any]


def describe_function(function: Callable[..., object]) -> FunctionSchema:
    """Describe a function. Every parameter needs a type annotation and has to be passable by name.

    The description is the docstring's text up to the first parameter. Parameters are described by ``:param city: ...``,
    in an ``Args:`` section, or by ``Annotated[str, "..."]``.

    :raises InvalidRequestError: a parameter without annotation, or with a type that has no JSON equivalent, by name
    """
    if not callable(function):
        raise InvalidRequestError.of("tools.function", function, "a function")
    try:
        name = str(getattr(function, "__name__", type(function).__name__))
        signature = inspect.signature(function)
        hints = typing.get_type_hints(function, include_extras=True)
        document = inspect.getdoc(function) or ""
    except Exception as exc:  # annotations are the caller's code
        allowed = f"a function whose signature can be read: {shortened(str(exc))}"
        raise InvalidRequestError.of("tools.function", function, allowed) from exc
    summary, meanings = _read_docstring(document)
    classes = _Classes()
    properties: dict[str, Any] = {}
    required = []
    for parameter in signature.parameters.values():
        where = f"{name}({parameter.name})"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidRequestError.of("tools", where, "parameters that can be given by name, each alone")
        if parameter.name not in hints:
            raise InvalidRequestError.of("tools", where, "a type annotation on every parameter of a tool")
        schema = _schema_of(hints[parameter.name], where, _MAX_DEPTH, classes)
        if parameter.name in meanings and "description" not in schema:
            schema["description"] = meanings[parameter.name]
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return FunctionSchema(name, summary, classes.with_definitions(parameters))


def describe_type(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type. Recursive classes are in its ``$defs``.

    :raises InvalidRequestError: the type, or a type in it, has no JSON equivalent
    """
    classes = _Classes()
    return classes.with_definitions(_schema_of(hint, _name_of(hint), _MAX_DEPTH, classes))


@attrs.define(eq=False)
class _Classes:
    """Keeps the classes of one schema, some of which may be recursive.

    :ivar described: classes that are being described, outermost first
    :ivar names: the names of the definitions of recursive classes
    :ivar definitions: their schemas
    """

    described: list[Any] = attrs.Factory(list)
    names: dict[Any, str] = attrs.Factory(dict)
    definitions: dict[str, dict[str, Any]] = attrs.Factory(dict)

    def reference(self, cls: Any) -> dict[str, Any]:
        """Return a reference to a class's definition."""
        if cls not in self.names:
            taken = self.names.values()
            name = re.sub(r"\W", "_", cls.__name__)
            free = (each for number in itertools.count(2) if (each := f"{name}{number}") not in taken)
            self.names[cls] = next(free) if name in taken else name
        return {"$ref": f"#/$defs/{self.names[cls]}"}

    def with_definitions(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema with the definitions that it refers to.

        :raises InvalidRequestError: every instance of a class would contain another instance of it
        """
        if not self.definitions:
            return schema
        finite: set[str] = set()
        while more := {name for name in self.definitions.keys() - finite if _ends(self.definitions[name], finite)}:
            finite |= more
        for name in self.definitions.keys() - finite:
            raise InvalidRequestError.of("tools", name, "a class that does not require an instance of itself")
        return {**schema, "$defs": self.definitions}


def _ends(schema: Any, finite: Container[str]) -> bool:
    """Return whether a schema has finite instances.

    :param finite: definitions known to have finite instances
    """
    if "$ref" in schema:
        return schema["$ref"].removeprefix("#/$defs/") in finite
    properties = schema.get("properties", {})
    parts = [properties[name] for name in schema.get("required", ())] + schema.get("prefixItems", [])
    choices = schema.get("anyOf")
    return all(_ends(part, finite) for part in parts) and (
        choices is None or any(_ends(choice, finite) for choice in choices)
    )


def _schema_of(hint: Any, where: str, depth: int, classes: _Classes) -> dict[str, Any]:
    """Return the JSON schema of a type.

    :raises InvalidRequestError: the type has none
    """
    if depth == 0:
        raise InvalidRequestError.of("tools", where, f"types nested at most {_MAX_DEPTH} deep")
    inner = depth - 1
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return {}
    if (scalar := scalar_type(hint)) is not None:
        return dict(scalar.schema)
    if origin is Annotated:
        schema = _schema_of(arguments[0], where, inner, classes)
        texts = [each for each in arguments[1:] if isinstance(each, str)]
        return schema | ({"description": texts[0]} if texts else {})
    if origin in (typing.Required, typing.NotRequired):
        return _schema_of(arguments[0], where, inner, classes)
    if origin is Literal:
        return _choice_of(arguments, where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _choice_of([member.value for member in hint], where)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(each, where, inner, classes) for each in arguments]}
    kind = origin or hint
    if kind in (list, Sequence, Iterable):
        return {"type": "array"} | ({"items": _schema_of(arguments[0], where, inner, classes)} if arguments else {})
    if kind is tuple:
        return _tuple_of(arguments, where, inner, classes)
    if kind in (dict, Mapping) and (not arguments or arguments[0] is str):
        more = {"additionalProperties": _schema_of(arguments[1], where, inner, classes)} if arguments else {}
        return {"type": "object"} | more
    if isinstance(hint, type) and (typing.is_typeddict(hint) or dataclasses.is_dataclass(hint) or attrs.has(hint)):
        return _class_of(hint, where, inner, classes)
    name = _name_of(hint)
    whole = "; generate_structured takes pydantic models as a whole, RootModels too" if _is_pydantic(hint) else ""
    raise InvalidRequestError.of("tools", name if name == where else f"{where}: {name}", _ALLOWED + whole)


def _choice_of(values: Iterable[Any], where: str) -> dict[str, Any]:
    values = list(values)
    kinds = set()
    for value in values:
        scalar = scalar_type(type(value))
        if scalar is None or scalar.read is not None:
            raise InvalidRequestError.of("tools", where, "choices that are strings, numbers, booleans or None")
        kinds.add(scalar.schema["type"])
    return {"type": kinds.pop(), "enum": values} if len(kinds) == 1 else {"enum": values}


def _tuple_of(arguments: tuple[Any, ...], where: str, depth: int, classes: _Classes) -> dict[str, Any]:
    if not arguments:
        return {"type": "array"}
    if arguments[-1] is ...:
        return {"type": "array", "items": _schema_of(arguments[0], where, depth, classes)}
    items = [_schema_of(each, where, depth, classes) for each in arguments]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}


def _class_of(cls: Any, where: str, depth: int, classes: _Classes) -> dict[str, Any]:
    """Return the schema of a class, or a reference to its definition if it is recursive."""
    if cls in classes.described or cls in classes.names:
        return classes.reference(cls)
    classes.described.append(cls)
    schema = _fields_of(cls, where, depth, classes)
    classes.described.pop()
    if cls not in classes.names:
        return schema
    classes.definitions[classes.names[cls]] = schema
    return classes.reference(cls)


def _fields_of(cls: Any, where: str, depth: int, classes: _Classes) -> dict[str, Any]:
    """Return the schema of a class's fields."""
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except (TypeError, NameError) as exc:
        raise InvalidRequestError.of(
            "tools", f"{where}: {_name_of(cls)}", f"a class whose annotations resolve ({exc})"
        ) from exc
    if typing.is_typeddict(cls):
        needed = required_keys(cls, hints)
        fields = {name: (hint, name in needed) for name, hint in hints.items()}
    else:
        fields = arguments_of(cls, hints)
    properties = {name: _schema_of(hint, f"{where}.{name}", depth, classes) for name, (hint, _) in fields.items()}
    required = [name for name, (_, is_required) in fields.items() if is_required]
    return {"type": "object", "properties": properties, "required": required}


def arguments_of(cls: Any, hints: Mapping[str, Any]) -> dict[str, tuple[Any, bool]]:
    """Return the constructor's arguments of a dataclass or an attrs class, by name: each argument's type, and whether
    it is required.

    :param hints: the annotations of the class
    """
    if attrs.has(cls):
        # The constructor's argument for a private attribute, _size, is named size.
        return {
            each.alias or each.name: (hints.get(each.name, each.type), each.default is attrs.NOTHING)
            for each in attrs.fields(cls)
            if each.init
        }
    nothing = dataclasses.MISSING
    found = {}
    for each in cls.__dataclass_fields__.values():  # unlike dataclasses.fields(), includes InitVars
        hint = hints[each.name]
        if each.init and ClassVar not in (hint, get_origin(hint)):
            required = each.default is nothing and each.default_factory is nothing
            found[each.name] = (hint.type if isinstance(hint, dataclasses.InitVar) else hint, required)
    return found


def required_keys(cls: Any, hints: Mapping[str, Any]) -> frozenset[str]:
    """Return the required keys of a TypedDict.

    :param hints: its annotations
    """
    # Python itself evaluates these two only if annotations are not strings.
    said = {typing.Required: True, typing.NotRequired: False}
    return frozenset(name for name in hints if said.get(get_origin(hints[name]), name in cls.__required_keys__))


def _is_pydantic(hint: Any) -> bool:
    return isinstance(hint, type) and callable(getattr(hint, "model_json_schema", None))


def _name_of(hint: Any) -> str:
    return hint.__qualname__ if isinstance(hint, type) else str(hint)


_REST: Final = re.compile(
    r":(?:param|type|returns?|rtype|raises)\b|(?:Args|Arguments|Parameters|Returns|Raises|Yields):\s*$"
)
_PARAM: Final = re.compile(r":param\s+(?:[^:]*\s)?(\w+):\s*(.*)")
_SECTION: Final = re.compile(r"(?:Args|Arguments|Parameters):\s*$")
_ARGUMENT: Final = re.compile(r"\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's text before its parameters, and its description of each parameter."""
    lines = text.splitlines()
    first = next((place for place, line in enumerate(lines) if _REST.match(line)), len(lines))
    meanings: dict[str, list[str]] = {}
    current: list[str] | None = None
    in_section = False
    indent = 0
    for line in lines[first:]:
        width = len(line) - len(line.lstrip())
        if (found := _PARAM.match(line)) is not None:
            current = meanings.setdefault(found[1], [])
            current.append(found[2])
        elif _REST.match(line):
            in_section, current, indent = _SECTION.match(line) is not None, None, 0
        elif in_section and (not indent or width <= indent) and (found := _ARGUMENT.match(line)) is not None:
            indent = indent or width
            current = meanings.setdefault(found[1], [])
            current.append(found[2])
        elif current is not None and line.strip() and width:
            current.append(line.strip())
        else:
            current = None
    said = {name: " ".join(part for part in parts if part) for name, parts in meanings.items()}
    return " ".join("\n".join(lines[:first]).split()), {name: part for name, part in said.items() if part}

"""Read JSON schemas of tools' arguments, which no library has checked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from paged_sdk.errors import shown
from paged_sdk.types.patterns import portable_pattern
from paged_sdk.types.schema_references import resolve_reference

__all__ = ["allows_strings", "names_string", "properties_of", "whole_pattern", "why_malformed"]

_ENDS_THERE: Final = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")
"""Matches an unescaped ``$`` at the end of a pattern."""


def _is_choice(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_kind(value: object) -> bool:
    return isinstance(value, str) or (_is_choice(value) and _is_names(value))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_SHAPES: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = MappingProxyType(
    {
        "anyOf": (_is_choice, "a list of one schema or more"),
        "enum": (_is_choice, "a list of one value or more"),
        "properties": (_is_object, "an object of schemas"),
        "required": (_is_names, "a list of names"),
        "type": (_is_kind, "a name, or a list of one name or more"),
        **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), (_is_count, "an int >= 0")),
    }
)
"""Maps keywords to a check of their values, and what the check expects."""
_RANGES: Final = (("minItems", "maxItems"), ("minLength", "maxLength"))


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of an object's properties; empty if the schema has none."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def allows_strings(schema: Any, root: Mapping[str, Any]) -> bool:
    """Tell whether a schema allows strings. Anything that is not a schema does.

    :param root: the schema in which references are resolved
    """
    return _allows_strings(schema, root, 8, set())


def _allows_strings(schema: Any, root: Mapping[str, Any], depth: int, known: set[str]) -> bool:
    """Implement :func:`allows_strings`.

    :param depth: how many levels of references and alternatives to follow; beyond, strings count as allowed
    :param known: references already followed, whose targets allow no strings by themselves; extended here
    """
    if not isinstance(schema, Mapping) or not depth:
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in known:
            return False
        known.add(reference)
        try:
            target = resolve_reference(root, reference)
        except LookupError:
            return True
        return _allows_strings(target, root, depth - 1, known)
    parts = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(parts, list):
        return any(_allows_strings(part, root, depth - 1, known) for part in parts)
    if "const" in schema:
        return isinstance(schema["const"], str)
    values = schema.get("enum")
    if isinstance(values, list) and "type" not in schema:
        return any(isinstance(value, str) for value in values)
    return names_string(schema)


def names_string(schema: Mapping[str, Any]) -> bool:
    """Tell whether strings are among the types that a schema allows."""
    kind = schema.get("type", "string")
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def why_malformed(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first keyword that has a value of the wrong kind, and what is wrong; None if there is none."""
    for keyword, (fits, allowed) in _SHAPES.items():
        if keyword in schema and not fits(schema[keyword]):
            return keyword, f"{keyword} = {shown(schema[keyword])}: expected {allowed}"
    for least, most in _RANGES:
        if schema.get(least, 0) > schema.get(most, math.inf):
            return least, f"{least} = {schema[least]} is more than {most} = {schema[most]}"
    return None


def whole_pattern(pattern: object) -> str:
    """Convert a pattern that may match anywhere in a text to a regular expression that matches the whole text.

    :raises ValueError: it is not a regular expression, or cannot be converted; says why
    """
    if not isinstance(pattern, str):
        raise ValueError(f"{pattern!r} is not a string")
    try:
        portable = portable_pattern(pattern)
    except ValueError as error:
        raise ValueError(f"{pattern!r}: {error}") from None
    begins, ends = portable.startswith("^"), _ENDS_THERE.search(portable) is not None
    if (begins or ends) and _has_alternatives(portable):
        raise ValueError(f"{pattern!r} has alternatives beside ^ or $: put them in parentheses")
    inner = portable[begins : len(portable) - ends]
    return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"


def _has_alternatives(pattern: str) -> bool:
    depth, in_class, escaped = 0, False, False
    for character in pattern:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and not depth:
            return True
    return False

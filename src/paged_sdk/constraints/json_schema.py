"""Prepares JSON schemas for the library that compiles them: what it would not enforce is refused or said otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from attrs import frozen

__all__ = ["Problem", "Schema", "position_of", "read_schema", "schemas_in"]

Schema: TypeAlias = dict[str, Any]

_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_IGNORED: Final = ("x-guidance", "contentEncoding", "contentMediaType", "contentSchema")
"""The library takes no notice of these, or lets the schema change how strictly it is read."""
_VALUES: Final = frozenset({"const", "default", "enum", "examples"})

_MAX_PATTERN_PAIRS: Final = 5_000
"""Patterns of one object's property names are compared with each other: 0.2 ms a pair."""
_MAX_DIVISORS: Final = 100_000
"""A number's remainder takes a state of the grammar for each value: 7 us, and 160 bytes."""

_LEAP_YEAR: Final = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR: Final = r"(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
_DAY: Final = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_DATE: Final = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME: Final = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_NAME: Final = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"

_PATTERNS: Final[Mapping[str, Schema]] = MappingProxyType(
    {
        "date": {"pattern": f"^{_DATE}$"},
        "time": {"pattern": f"^{_TIME}$"},
        "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
        "hostname": {"pattern": rf"^{_NAME}(?:\.{_NAME})*$", "maxLength": 63},
    }
)
"""Says what formats mean that the library takes too widely: it allows 29 February in every year, a 61st second in every
minute, and any punycode. Host names are those of up to 63 characters without internationalized parts."""


@frozen
class Problem:
    """Says why a constraint cannot be enforced.

    :ivar keyword: the keyword of a JSON schema that is the reason, if it is known
    :ivar position: its schema's place, as a JSON pointer
    """

    message: str
    keyword: str = ""
    position: str | None = None


def read_schema(source: str) -> Schema | Problem:
    """Read a schema, refuse what compiling it would not, or would take too long to, and put patterns in place of some
    formats."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        return Problem(f"the schema is no JSON: {error}")
    if not isinstance(schema, dict):
        return Problem(f"the schema is a {type(schema).__name__}: expected an object")
    num_pairs, num_divisors = 0, 0.0
    for position, each in list(schemas_in(schema)):
        for keyword in each.keys() & {*_IGNORED}:
            return Problem(f"{keyword} is not supported", keyword, position)
        required = each.get("required")
        least, num_required = each.get("minProperties"), len(required) if isinstance(required, list) else 0
        if isinstance(least, int | float) and least > num_required + 1:
            message = f"minProperties is {least}, and {num_required} properties are required: names that a text "
            return Problem(message + "repeats would be counted twice", "minProperties", position)
        patterns, divisor = each.get("patternProperties"), each.get("multipleOf")
        num_pairs += len(patterns) ** 2 // 2 if isinstance(patterns, dict) else 0
        if num_pairs > _MAX_PATTERN_PAIRS:
            return Problem("too many patterns to compare with each other", "patternProperties", position)
        num_divisors += divisor if isinstance(divisor, int | float) else 0
        if num_divisors > _MAX_DIVISORS:
            return Problem(f"multipleOf is more than {_MAX_DIVISORS} in all", "multipleOf", position)
        name = each.get("format")
        if isinstance(name, str) and name in _PATTERNS:
            del each["format"]
            _add(each, _PATTERNS[name])
    return schema


def position_of(keyword: str, schema: Schema) -> str | None:
    """Return the JSON pointer of the first schema that has a keyword."""
    return next((position for position, each in schemas_in(schema) if keyword in each), None)


def _add(schema: Schema, more: Schema) -> None:
    """Let a schema ask for more of what it describes."""
    if not schema.keys() & more.keys():
        schema.update(more)
    elif isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"].append(more)


def schemas_in(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield a schema and all schemas in it, each with its JSON pointer. What stands under an unknown keyword counts as
    a schema, since references may lead to it.
    """
    pending: list[tuple[str, object]] = [("", schema)]
    while pending:
        position, each = pending.pop()
        if not isinstance(each, dict):
            continue
        yield position, each
        below: list[tuple[str, object]] = []
        for key, value in each.items():
            at = f"{position}/{_escaped(key)}"
            if key in _VALUES:
                continue
            if isinstance(value, list):
                below += [(f"{at}/{place}", part) for place, part in enumerate(value)]
            elif key in _MAPS and isinstance(value, dict):
                below += [(f"{at}/{_escaped(name)}", part) for name, part in value.items()]
            else:
                below.append((at, value))
        pending += reversed(below)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")

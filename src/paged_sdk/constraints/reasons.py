"""Finds the keyword of a JSON schema that an error message of llguidance is about."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from paged_sdk.constraints.json_schema import Problem, schemas_in

__all__ = ["problem_of"]

_NAMED: Final = re.compile(r'Unimplemented keys: \["([^"]+)"|(?:for|of) \'(\w+)\'|^(?:Unsatisfiable schema: )?(\w+) \(')
_MEANT: Final[Mapping[str, tuple[str, ...]]] = {
    "Unknown format": ("format",),
    "(?:interval|range)": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "regexes": ("patternProperties",),
    "(?:regex|lookarounds|Constant)": ("pattern", "format", "maxLength", "minLength", "patternProperties"),
    "(?:Resource|Anchor|Pointer|Reference|no text|no token|not found)": ("$ref", "$schema", "pattern"),
    "(?:oneOf|options)": ("oneOf", "anyOf"),
    "anyOf is empty": ("enum", "anyOf", "type"),
    "multiple": ("multipleOf",),
    "required property": ("required",),
    "required > maxProperties": ("maxProperties",),
    "Properties": ("minProperties", "maxProperties"),
    "(?:required item|Items)": ("minItems", "prefixItems", "items"),
    "(?:Invalid type|type must)": ("type",),
    "incompatible": ("allOf", "$ref", "anyOf", "const", "enum", "type"),
}
"""Patterns of messages, and the keywords that they may be about, likelier ones first."""


def problem_of(message: str, schema: dict[str, Any]) -> Problem:
    """Return the problem that a message describes, with the first place of its keyword in a schema.

    :param message: an error message of llguidance
    :param schema: the schema that was compiled
    """
    if "schema is false" in message and "required" not in message:
        place = next((f"{at}/{key}" for at, each in schemas_in(schema) for key in each if each[key] is False), None)
        return Problem(message, "false", place)
    named = _NAMED.search(message)
    keywords: tuple[str, ...] = ()
    if named is not None:
        keywords = (str(named[1] or named[2] or named[3]),)
    else:
        for said, meant in _MEANT.items():
            if re.search(said, message):
                keywords = meant
                break
    if named is not None and named[1]:  # may also be in a place that is not a schema
        return Problem(message, keywords[0], next((at for at, each in schemas_in(schema) if named[1] in each), None))
    places = {keyword: at for at, each in reversed([*schemas_in(schema)]) for keyword in each}
    keyword = next((each for each in keywords if each in places), keywords[0] if len(keywords) == 1 else "")
    return Problem(message, keyword, places.get(keyword))

"""Finds the keyword of a JSON schema that an error message of llguidance is about."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from paged_sdk.constraints.json_schema import Problem
from paged_sdk.constraints.schema_parts import Place, Schema, list_of, schemas_in, target_of

__all__ = ["problem_of"]

_NAMED: Final = re.compile(r'Unimplemented keys: \["([^"]+)"|(?:for|of) \'(\w+)\'|^(?:Unsatisfiable schema: )?(\w+) \(')
_REFERRED: Final = re.compile(r"json-schema:///#(/\S+)")
"""Matches the JSON pointer of a schema in the document."""
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


def problem_of(message: str, schema: Schema) -> Problem:
    """Return the problem that a message describes, with the first place of its keyword in a schema.

    :param message: an error message of llguidance
    :param schema: the schema that was compiled
    """
    if "schema is false" in message and "required" not in message:
        return Problem(message, "false", _false_position(message, schema))
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


def _false_position(message: str, schema: Schema) -> str | None:
    """Return the position of the schema ``false`` that a message is about; None if it is not found.

    llguidance names the target of the last reference that it followed, if any.
    """
    referred = _REFERRED.search(message)
    start = referred[1] if referred is not None else ""
    found = _false_in(target_of(schema, f"#{start}") if start else schema, Place())
    return None if found is None else f"{start}{found}"


def _false_in(schema: object, place: Place) -> Place | None:
    """Return the place of a schema ``false`` because of which no value fits a schema; None if there is none."""
    if schema is False:
        return place
    if not isinstance(schema, dict):
        return None

    def parts(keyword: str) -> list[Place | None]:
        listed = enumerate(list_of(schema.get(keyword)))
        return [_false_in(part, Place(Place(place, keyword), index)) for index, part in listed]

    for found in parts("allOf"):
        if found is not None:
            return found
    for keyword in ("anyOf", "oneOf"):
        choices = parts(keyword)
        if choices and None not in choices:
            return choices[0]
    return None

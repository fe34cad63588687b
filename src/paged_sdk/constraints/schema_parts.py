"""Finds the parts of a JSON schema document: its schemas, and the targets of references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeAlias

from paged_sdk.types.schema_references import resolve_reference

__all__ = ["Place", "Schema", "list_of", "schemas_in", "target_of"]

Schema: TypeAlias = dict[str, Any]

_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES: Final = frozenset({"const", "default", "discriminator", "enum", "examples"})


class Place(NamedTuple):
    """Locates a part of a schema document. It is converted to a JSON pointer only when needed: below a name of 500,000
    characters, the pointers of all parts would fill the memory.

    :ivar above: the part that contains it; None for the whole document
    :ivar name: its keyword or key, or its index in a list
    """

    above: Place | None = None
    name: str | int = ""

    def __str__(self) -> str:
        names: list[str] = []
        place = self
        while place.above is not None:
            names.append("/" + _escaped(str(place.name)))
            place = place.above
        return "".join(reversed(names))


def schemas_in(schema: Schema, seen: set[int] | None = None) -> Iterator[tuple[Place, Schema]]:
    """Yield a schema and all schemas in it, each with its place. The value of an unknown keyword counts as a schema,
    since references may lead to it.

    :param seen: ``id`` of schemas to skip, including all schemas in them; the yielded ones are added
    """
    pending: list[tuple[Place, object]] = [(Place(), schema)]
    while pending:
        place, each = pending.pop()
        if not isinstance(each, dict) or (seen is not None and id(each) in seen):
            continue
        if seen is not None:
            seen.add(id(each))
        yield place, each
        below: list[tuple[Place, object]] = []
        for key, value in each.items():
            at = Place(place, key)
            if key in _VALUES:
                continue
            if isinstance(value, list):
                below += [(Place(at, number), part) for number, part in enumerate(value)]
            elif key in _MAPS and isinstance(value, dict):
                below += [(Place(at, name), part) for name, part in value.items()]
            else:
                below.append((at, value))
        pending += reversed(below)


def target_of(root: Schema, reference: object) -> object:
    """Return the schema that a reference within a document leads to; True, which allows everything, if not certain."""
    try:
        return resolve_reference(root, reference)
    except LookupError:
        return True


def list_of(value: object) -> list[Any]:
    """Return a keyword's value if it is a list, otherwise an empty list."""
    return value if isinstance(value, list) else []


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")

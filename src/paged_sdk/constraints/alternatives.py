"""Decides whether the schemas of a JSON Schema "oneOf" are mutually exclusive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import combinations
from typing import Final

from attrs import field, frozen

from paged_sdk.constraints.schema_parts import Schema, list_of, target_of

__all__ = ["Alternatives"]

_MAX_DEPTH: Final = 16
_MAX_STEPS: Final = 200_000
"""Bounds the work per document: visiting a schema or one of its listed items, or comparing two, is a step; 0.2 s."""
_VALUES_OF_A_STEP: Final = 32
"""Number of values that are compared in the time of one step."""
_READ: Final = frozenset({"properties", "required", "type"})
"""Keywords whose values are read completely."""
_TYPES: Final = frozenset({"null", "boolean", "number", "string", "array", "object"})


@frozen
class _Facts:
    """Holds what is certain about the values that fit a schema.

    :ivar types: their possible types
    :ivar values: all possible values, if the schema lists them
    :ivar members: by name, all possible values of an object's property, if present
    :ivar required: names of properties that every object has
    """

    types: frozenset[str] = _TYPES
    values: frozenset[object] | None = None
    members: Mapping[str, frozenset[object]] = field(factory=dict)
    required: frozenset[str] = frozenset()

    def and_(self, other: _Facts) -> _Facts:
        members = {**self.members, **other.members}
        for name in self.members.keys() & other.members.keys():
            members[name] = self.members[name] & other.members[name]
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            values = self.values & other.values
        return _Facts(self.types & other.types, values, members, self.required | other.required)

    def or_(self, other: _Facts) -> _Facts:
        shared = self.members.keys() & other.members.keys()
        members = {name: self.members[name] | other.members[name] for name in shared}
        values = None if self.values is None or other.values is None else self.values | other.values
        return _Facts(self.types | other.types, values, members, self.required & other.required)

    def excludes(self, other: _Facts) -> bool:
        """Tell whether no value can satisfy both."""
        if self.types.isdisjoint(other.types):
            return True
        if self.values is not None and other.values is not None and self.values.isdisjoint(other.values):
            return True
        if {"object"} not in (self.types, other.types):
            return False
        names = self.members.keys() & other.members.keys()
        return any(
            self.members[name].isdisjoint(other.members[name])
            for name in names
            if name in self.required or name in other.required
        )

    @property
    def size(self) -> int:
        """Return the number of values to compare."""
        return len(self.values or ()) + sum(map(len, self.members.values()))


class Alternatives:
    """Compares schemas of one document.

    :param root: the document, in which references are resolved
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_left = _MAX_STEPS

    def exclude_each_other(self, schemas: Sequence[object]) -> bool:
        """Tell whether no value fits two of these schemas, because of its type, its listed values or a discriminating
        property.

        :returns: False also if this is not certain, or would take too long to find out
        """
        self._num_left -= len(schemas) ** 2
        if self._num_left < 0:
            return False
        facts = [self._facts(schema) for schema in schemas]
        self._num_left -= len(schemas) * sum(each.size for each in facts) // _VALUES_OF_A_STEP
        if self._num_left < 0:
            return False
        return all(first.excludes(second) for first, second in combinations(facts, 2))

    def _facts(self, schema: object, depth: int = 0) -> _Facts:
        self._num_left -= 1
        if schema is False:
            return _Facts(types=frozenset())
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or self._num_left < 0:
            return _Facts()
        lists = (schema[name] for name in _READ & schema.keys())
        self._num_left -= sum(len(each) for each in lists if isinstance(each, list | dict))
        facts = self._own_facts(schema)
        if "$ref" in schema:
            facts = facts.and_(self._facts(target_of(self._root, schema["$ref"]), depth + 1))
        for part in list_of(schema.get("allOf")):
            facts = facts.and_(self._facts(part, depth + 1))
        for keyword in ("anyOf", "oneOf"):
            parts = [self._facts(part, depth + 1) for part in list_of(schema.get(keyword))]
            if parts:
                facts = facts.and_(reduce(_Facts.or_, parts))
        return facts

    def _own_facts(self, schema: Schema) -> _Facts:
        types = _TYPES
        said = schema.get("type")
        names = [said] if isinstance(said, str) else list_of(said)
        if names:
            types = frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))
        values = self._values(schema)
        properties, members = schema.get("properties"), {}
        for name, each in properties.items() if isinstance(properties, dict) else ():
            for _ in range(_MAX_DEPTH):
                if not isinstance(each, dict) or "$ref" not in each:
                    break
                each = target_of(self._root, each["$ref"])
            allowed = self._values(each)
            if allowed is not None:
                members[name] = allowed
        required = frozenset(name for name in list_of(schema.get("required")) if isinstance(name, str))
        return _Facts(types, values, members, required)

    def _values(self, schema: object) -> frozenset[object] | None:
        """Return the values that a schema lists by const or enum; None if it lists none, or some are lists or
        objects.
        """
        if not isinstance(schema, dict):
            return None
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(choices, list):
            return None
        self._num_left -= len(choices)
        if self._num_left < 0 or any(isinstance(choice, list | dict) for choice in choices):
            return None
        return frozenset((isinstance(choice, bool), choice) for choice in choices)

"""Finds references in JSON schemas that no finite value satisfies, because each value must contain another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from paged_sdk.constraints.schema_parts import Schema, list_of, target_of

__all__ = ["endless_reference"]

_MAX_DEPTH: Final = 32
_MAX_STEPS: Final = 200_000
"""Bounds the number of schemas and listed items that are visited: 0.1 s."""


def endless_reference(root: Schema, references: Iterable[str]) -> str | None:
    """Return a reference that no finite value satisfies.

    :param root: the document, in which references are resolved. "oneOf" is ignored: where it was not replaced by
        "anyOf", it is refused anyway
    :param references: the references to check
    :returns: None also if this is not certain, or would take too long to find out
    """
    targets = {each: target_of(root, each) for each in references}
    endings = _Endings(targets)
    while more := {each for each in targets.keys() - endings.finite if endings.has_value(targets[each])}:
        endings.finite |= more
    return next((each for each in targets if each not in endings.finite), None)


class _Endings:
    """Decides which schemas have finite values.

    :ivar finite: references known to have finite values
    """

    def __init__(self, targets: Mapping[str, object]) -> None:
        self.finite: set[str] = set()
        self._targets = targets
        self._num_left = _MAX_STEPS

    def has_value(self, schema: object, depth: int = 0) -> bool:
        """Tell whether a finite value satisfies a schema, given the references known to be :attr:`finite`."""
        self._num_left -= 1 + _length(schema)
        if (
            not isinstance(schema, dict)
            or depth > _MAX_DEPTH
            or self._num_left < 0
            or schema.keys() & {"const", "enum"}
        ):
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference in self._targets and reference not in self.finite:
            return False
        choices = list_of(schema.get("anyOf"))
        return all(self.has_value(part, depth + 1) for part in _parts(schema)) and (
            not choices or any(self.has_value(choice, depth + 1) for choice in choices)
        )


def _parts(schema: Schema) -> list[object]:
    """Return the schemas that apply to every value of a schema, or to a part that every value has."""
    parts = [*list_of(schema.get("allOf"))]
    if schema.get("type") == "object" and isinstance(properties := schema.get("properties"), dict):
        names = [name for name in list_of(schema.get("required")) if isinstance(name, str)]
        parts += [properties[name] for name in names if name in properties]
    if schema.get("type") == "array" and isinstance(least := schema.get("minItems"), int):
        first = list_of(schema.get("prefixItems"))
        parts += first[:least]
        if least > len(first):
            parts.append(schema.get("items"))
    return parts


def _length(schema: object) -> int:
    """Return how many items a schema lists."""
    lists = ("allOf", "anyOf", "prefixItems", "required")
    return sum(len(list_of(schema.get(each))) for each in lists) if isinstance(schema, dict) else 0

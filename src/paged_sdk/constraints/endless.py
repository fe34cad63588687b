"""Finds JSON schemas of which no value ends, since each holds another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

from paged_sdk.constraints.references import target_of

__all__ = ["endless_reference"]

Schema: TypeAlias = dict[str, Any]

_MAX_DEPTH: Final = 32
_MAX_STEPS: Final = 200_000
"""Schemas to look into, and parts that these list: 0.1 s."""


def endless_reference(root: Schema, references: Iterable[str]) -> str | None:
    """Return a reference whose values would never end.

    :param root: what references refer to. "oneOf" is not looked at: what is left of it is refused anyway
    :returns: None also if that is not certain, or would take too long to find out
    """
    targets = {each: root if each == "#" else target_of(root, each) for each in references}
    endings = _Endings(targets)
    while more := {each for each in targets.keys() - endings.finite if endings.has_value(targets[each])}:
        endings.finite |= more
    return next((each for each in targets if each not in endings.finite), None)


class _Endings:
    """Tells which schemas have values that end.

    :ivar finite: references of which that is known
    """

    def __init__(self, targets: Mapping[str, object]) -> None:
        self.finite: set[str] = set()
        self._targets = targets
        self._num_left = _MAX_STEPS

    def has_value(self, schema: object, depth: int = 0) -> bool:
        """Tell whether some value that ends is valid, as far as :attr:`finite` is known."""
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
        choices = _list(schema.get("anyOf"))
        return all(self.has_value(part, depth + 1) for part in _parts(schema)) and (
            not choices or any(self.has_value(choice, depth + 1) for choice in choices)
        )


def _parts(schema: Schema) -> list[object]:
    """Return the schemas by which there is something in every value."""
    parts = [*_list(schema.get("allOf"))]
    if schema.get("type") == "object" and isinstance(properties := schema.get("properties"), dict):
        names = [name for name in _list(schema.get("required")) if isinstance(name, str)]
        parts += [properties[name] for name in names if name in properties]
    if schema.get("type") == "array" and isinstance(least := schema.get("minItems"), int):
        first = _list(schema.get("prefixItems"))
        parts += first[:least]
        if least > len(first):
            parts.append(schema.get("items"))
    return parts


def _length(schema: object) -> int:
    """Return how many parts a schema lists."""
    lists = ("allOf", "anyOf", "prefixItems", "required")
    return sum(len(_list(schema.get(each))) for each in lists) if isinstance(schema, dict) else 0


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []

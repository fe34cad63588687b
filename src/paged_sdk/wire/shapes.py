"""Defines shapes of JSON values. A shape checks values, and describes itself as a JSON schema.

Shapes are made from type annotations: types, ``Literal`` for fixed values, and in ``Annotated``, :class:`Bounds` and a
sentence. The sentence describes the field; for a field that is only accepted at values without effect, such as null, it
gives the reason.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NotRequired,
    Required,
    TypeAlias,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import attrs
from attrs import field, frozen

from paged_sdk import InvalidRequestError

__all__ = ["Bounds", "Fields", "NamedSchemas", "Shape", "shape_of"]

NamedSchemas: TypeAlias = MutableMapping[str, Any] | None
"""Collects the schemas of objects by the names of their types, so that other schemas refer to them by ``$ref``; None:
schemas of objects are inlined.
"""

REFERENCE: Final = "#/components/schemas/"


@frozen
class Bounds:
    """Bounds a number, or the length of a string or list; both ends included. None: no bound."""

    low: float | None = None
    high: float | None = None

    def fits(self, number: float) -> bool:
        """Tell whether a number is within the bounds."""
        return (self.low is None or number >= self.low) and (self.high is None or number <= self.high)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f">= {_shown(self.low)}" if self.low is not None else f"<= {_shown(self.high)}"
        return f"from {_shown(self.low)} to {_shown(self.high)}"

    def schema(self, low: str, high: str) -> dict[str, Any]:
        """Return the bounds under the keywords of a JSON schema."""
        return {key: value for key, value in ((low, self.low), (high, self.high)) if value is not None}


def _shown(bound: float | None) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


class Shape(ABC):
    """Checks values of one type."""

    @property
    @abstractmethod
    def allowed(self) -> str:
        """Describe the accepted values in words, for errors."""

    @abstractmethod
    def takes(self, value: object) -> bool:
        """Tell whether a value has the right type, without checking its items or fields."""

    def check(self, path: str, value: object) -> None:
        """Check a value, with its items and fields.

        :param path: the value's path in the body, for errors
        :raises InvalidRequestError: the value is not accepted
        """
        if not self.takes(value):
            raise InvalidRequestError.of(path, value, self.allowed)

    @abstractmethod
    def schema(self, schemas: NamedSchemas) -> dict[str, Any]:
        """Return the JSON schema of the accepted values.

        :param schemas: see :data:`NamedSchemas`
        """


@frozen
class Anything(Shape):
    """Accepts every value; the code that uses the value checks it."""

    @property
    def allowed(self) -> str:
        return "any value"

    def takes(self, value: object) -> bool:
        return True

    def schema(self, schemas: NamedSchemas) -> dict[str, Any]:
        return {}


@frozen
class Scalar(Shape):
    """Accepts values of one scalar type of JSON."""

    kind: type
    bounds: Bounds | None = None

    @property
    def allowed(self) -> str:
        name = _SCALARS[self.kind][1]
        if self.bounds is None:
            return name
        return f"{name} of {self.bounds} characters" if self.kind is str else f"{name} {self.bounds}"

    def takes(self, value: object) -> bool:
        if isinstance(value, bool) and self.kind is not bool:
            return False
        if not isinstance(value, (int, float) if self.kind is float else self.kind):
            return False
        return self.bounds is None or self.bounds.fits(len(value) if isinstance(value, str) else value)  # type: ignore[arg-type]  # a number

    def schema(self, schemas: NamedSchemas) -> dict[str, Any]:
        keys = ("minLength", "maxLength") if self.kind is str else ("minimum", "maximum")
        return {"type": _SCALARS[self.kind][0], **(self.bounds.schema(*keys) if self.bounds else {})}


_SEVERAL: Final[Mapping[str, str]] = {
    "a string": "strings",
    "an integer": "integers",
    "a number": "numbers",
    "an object": "objects",
}
_SCALARS: Final[Mapping[type, tuple[str, str]]] = {
    str: ("string", "a string"),
    int: ("integer", "an integer"),
    float: ("number", "a number"),
    bool: ("boolean", "true or false"),
    NoneType: ("null", "null"),
}


@frozen
class Values(Shape):
    """Accepts fixed values."""

    values: tuple[object, ...]

    @property
    def allowed(self) -> str:
        return " or ".join(map(json.dumps, self.values))

    def takes(self, value: object) -> bool:
        return any(type(value) is type(each) and value == each for each in self.values)

    def schema(self, schemas: NamedSchemas) -> dict[str, Any]:
        return {"enum": list(self.values)}


@frozen
class ListOf(Shape):
    """Accepts lists of values of one shape."""

    item: Shape
    bounds: Bounds | None = None

    @property
    def allowed(self) -> str:
        count, item = f"{self.bounds} " if self.bounds else "", self.item.allowed
        return f"a list of {count}{_SEVERAL[item]}" if item in _SEVERAL else f"a list of {count}items, each {item}"

    def takes(self, value: object) -> bool:
        return isinstance(value, Sequence) and not isinstance(value, str | bytes)

    def check(self, path: str, value: object) -> None:
        super().check(path, value)
        if self.bounds is not None and not self.bounds.fits(len(cast(Sequence[object], value))):
            raise InvalidRequestError.of(path, value, self.allowed)
        for place, item in enumerate(cast(Sequence[object], value)):
            self.item.check(f"{path}[{place}]", item)

    def schema(self, schemas: NamedSchemas) -> dict[str, Any]:
        bounds = self.bounds.schema("minItems", "maxItems") if self.bounds else {}
        return {"type": "array", "items": self.item.schema(schemas), **bounds}


@frozen
class MapOf(Shape):
    """Accepts objects with any keys."""

    value: Shape

    @property
    def allowed(self) -> str:
        return "an object"

    def takes(self, value: object) -> bool:
        return isinstance(value, Mapping)

    def check(self, path: str, value: object) -> None:
        super().check(path, value)
        for key, each in cast(Mapping[object, object], value).items():
            self.value.check(f"{path}[{json.dumps(str(key)[:60])}]", each)

    def schema(self, schemas: NamedSchemas) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.value.schema(schemas) or True}


@frozen
class Field:
    """Describes one field of an object.

    :ivar description: the field's description, or why it has no effect
    """

    shape: Shape
    is_required: bool
    description: str

    def check(self, path: str, value: object) -> None:
        """Check a value. If the field is only accepted at values without effect, the error gives the reason.

        :raises InvalidRequestError: the value is not accepted
        """
        if self._asks_for_nothing and self.description and not self.shape.takes(value):
            raise InvalidRequestError.of(path, value, f"{self.shape.allowed} ({self.description})")
        self.shape.check(path, value)

    @property
    def _asks_for_nothing(self) -> bool:
        shapes = self.shape.shapes if isinstance(self.shape, OneOf) else (self.shape,)
        return all(isinstance(each, Values) or each == Scalar(NoneType) for each in shapes)


@frozen
class Fields(Shape):
    """Accepts objects with the keys of a TypedDict, and no others."""

    name: str
    fields: Mapping[str, Field] = field(hash=False)

    @classmethod
    def of(cls, kind: Any) -> Fields:
        hints = get_type_hints(kind, include_extras=True)
        if is_typeddict(kind):
            required = {name for name in kind.__required_keys__ if get_origin(hints[name]) is not NotRequired}
        else:  # an attrs class, as ``attrs.asdict`` writes its values
            required = set(attrs.fields_dict(kind))
        fields = {}
        for name, hint in hints.items():
            is_required = name in required or get_origin(hint) is Required
            inner = get_args(hint)[0] if get_origin(hint) in (Required, NotRequired) else hint
            descriptions = [each for each in getattr(inner, "__metadata__", ()) if isinstance(each, str)]
            fields[name] = Field(shape_of(inner), is_required, descriptions[0] if descriptions else "")
        return cls(kind.__name__, fields)

    @property
    def allowed(self) -> str:
        required = ", ".join(json.dumps(name) for name, each in self.fields.items() if each.is_required)
        return f"an object with {required}" if required else "an object"

    def takes(self, value: object) -> bool:
        return isinstance(value, Mapping)

    def check(self, path: str, value: object) -> None:
        super().check(path, value)
        given = cast(Mapping[str, object], value)
        before = f"{path}." if path else ""
        for name, each in given.items():
            if name not in self.fields:
                near = get_close_matches(name[:100], self.fields, n=1)
                others = ", ".join(each for each in self.fields if each not in near)
                allowed = f"one of the fields {others}"
                if near:
                    allowed = f"{near[0]}, or one of the other fields {others}" if others else near[0]
                raise InvalidRequestError.of(f"{before}{name}"[:100], each, allowed)
            self.fields[name].check(f"{before}{name}", each)
        for name, part in self.fields.items():
            if part.is_required and name not in given:
                raise InvalidRequestError(
                    f"{before}{name} is missing: expected {part.shape.allowed}",
                    field=f"{before}{name}",
                    allowed=part.shape.allowed,
                )

    def tag(self, key: str) -> tuple[object, ...]:
        """Return the fixed values that a field accepts; empty if it accepts others, or there is no such field."""
        shape = self.fields[key].shape if key in self.fields else None
        return shape.values if isinstance(shape, Values) else ()

    def is_tagged(self, value: Mapping[str, object]) -> bool:
        """Tell whether an object's ``type`` is accepted here, or is absent and optional."""
        return value["type"] in self.tag("type") if "type" in value else not self.fields["type"].is_required

    def schema(self, schemas: NamedSchemas) -> dict[str, Any]:
        properties = {}
        for name, each in self.fields.items():
            properties[name] = {
                **each.shape.schema(schemas),
                **({"description": each.description} if each.description else {}),
            }
        required = [name for name, each in self.fields.items() if each.is_required]
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        if required:
            schema["required"] = required
        if schemas is None:
            return schema
        known = schemas.setdefault(self.name, schema)  # not within the assertion: python -O drops it
        assert known == schema, f"two types are called {self.name}"
        return {"$ref": REFERENCE + self.name}


@frozen
class OneOf(Shape):
    """Accepts values of any of several shapes. Objects are distinguished by their ``type``."""

    shapes: tuple[Shape, ...]

    @property
    def allowed(self) -> str:
        return " or ".join(dict.fromkeys(shape.allowed for shape in self.shapes))

    def takes(self, value: object) -> bool:
        return any(shape.takes(value) for shape in self.shapes)

    def check(self, path: str, value: object) -> None:
        fitting: list[Shape] = [shape for shape in self.shapes if shape.takes(value)]
        if len(fitting) > 1 and isinstance(value, Mapping):
            tagged = [shape for shape in fitting if isinstance(shape, Fields) and shape.tag("type")]
            found = [shape for shape in tagged if shape.is_tagged(value)]
            if tagged and not found:
                types = " or ".join(json.dumps(tag) for shape in tagged for tag in shape.tag("type"))
                raise InvalidRequestError.of(f"{path}.type", value.get("type"), types)
            fitting = [*found] or fitting
        if not fitting:
            raise InvalidRequestError.of(path, value, self.allowed)
        for shape in fitting[:-1]:  # takes() cannot distinguish lists of different items
            with suppress(InvalidRequestError):
                shape.check(path, value)
                return
        fitting[-1].check(path, value)

    def schema(self, schemas: NamedSchemas) -> dict[str, Any]:
        return {"anyOf": [shape.schema(schemas) for shape in self.shapes]}


def shape_of(hint: Any, bounds: Bounds | None = None) -> Shape:
    """Return the shape of a type annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        found = [each for each in arguments[1:] if isinstance(each, Bounds)]
        return shape_of(arguments[0], found[0] if found else bounds)
    if origin in (Union, UnionType):
        return OneOf(tuple(shape_of(each, bounds) for each in arguments))
    if origin is Literal:
        return Values(arguments)
    if origin is list:
        return ListOf(shape_of(arguments[0]), bounds)
    if origin is dict:
        return MapOf(shape_of(arguments[1]))
    if is_typeddict(hint) or attrs.has(hint):
        return Fields.of(hint)
    if hint is Any:
        return Anything()
    kind = NoneType if hint is None else hint
    assert kind in _SCALARS, f"no JSON is read as {hint}"
    return Scalar(kind, None if kind in (NoneType, bool) else bounds)

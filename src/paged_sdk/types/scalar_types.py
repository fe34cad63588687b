"""List the scalar Python types that the arguments of a tool call can have, and how JSON writes their values."""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from attrs import frozen

__all__ = ["SCALAR_TYPES", "ScalarType", "scalar_type"]


@frozen
class ScalarType:
    """Describes how JSON writes the values of a Python type.

    :ivar name: the type's name in errors
    :ivar expected: what a value has to be, in words
    :ivar schema: the JSON schema of its values
    :ivar read: makes a value of the string that JSON has for it; None: JSON itself has this type
    """

    name: str
    expected: str
    schema: Mapping[str, str]
    read: Callable[[str], Any] | None = None


def _finite(text: str) -> decimal.Decimal:
    number = decimal.Decimal(text)
    if not number.is_finite():
        raise ValueError(text)
    return number


def _written(kind: type, read: Callable[[str], Any], **schema: str) -> ScalarType:
    """Describe a type that JSON does not have: its values are written as strings."""
    return ScalarType(kind.__name__, f"a {kind.__name__}", {"type": "string", **schema}, read)


SCALAR_TYPES: Final[Mapping[type, ScalarType]] = MappingProxyType(
    {
        int: ScalarType("int", "an integer", {"type": "integer"}),
        float: ScalarType("float", "a number", {"type": "number"}),
        str: ScalarType("str", "a string", {"type": "string"}),
        bool: ScalarType("bool", "true or false", {"type": "boolean"}),
        type(None): ScalarType("None", "null", {"type": "null"}),
        datetime.datetime: _written(datetime.datetime, datetime.datetime.fromisoformat, format="date-time"),
        datetime.date: _written(datetime.date, datetime.date.fromisoformat, format="date"),
        datetime.time: _written(datetime.time, datetime.time.fromisoformat, format="time"),
        uuid.UUID: _written(uuid.UUID, uuid.UUID, format="uuid"),
        decimal.Decimal: _written(decimal.Decimal, _finite, pattern=r"^-?[0-9]{1,18}(\.[0-9]{1,18})?$"),
    }
)


def scalar_type(hint: object) -> ScalarType | None:
    """Return the description of a type; None: it is not a scalar type."""
    return SCALAR_TYPES.get(hint) if isinstance(hint, type) else None

"""Convert the JSON arguments of a tool call to a Python function's arguments."""

from __future__ import annotations

import dataclasses
import decimal
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import attrs

from paged_sdk.types.function_schema import arguments_of, required_keys
from paged_sdk.types.scalar_types import ScalarType, scalar_type

__all__ = ["bind_arguments", "convert"]

_MAX_DEPTH: Final = 150
"""Most levels of nested types: each takes two of Python's thousand nested calls."""


def bind_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments, converted to the types of a function's annotations; parameters without one take the
    JSON value.

    Enum members come from their values, dataclasses and attrs classes from objects. Nothing is guessed: the string "3"
    is not an integer, but the number 3.0 is one.

    :raises ValueError: an argument is missing, unknown or of another type; its text is meant for the model
    """
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function, include_extras=True)
    try:
        signature.bind(**arguments)
    except TypeError as exc:
        raise ValueError(str(exc)) from None
    return {name: _converted(hints.get(name, Any), value, name, _MAX_DEPTH) for name, value in arguments.items()}


def convert(hint: Any, value: Any, name: str) -> Any:
    """Return a JSON value converted to a type.

    :param name: the value's name in errors
    :raises ValueError: the value does not fit the type
    """
    return _converted(hint, value, name, _MAX_DEPTH)


def _converted(hint: Any, value: Any, where: str, depth: int) -> Any:
    """Return a JSON value converted to a type.

    :param where: the value's name in errors
    """
    if depth == 0:
        raise ValueError(f"nested too deep: {where}"[:300])
    inner = depth - 1
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Annotated, typing.Required, typing.NotRequired):
        return _converted(arguments[0], value, where, inner)
    if (scalar := scalar_type(hint)) is not None:
        return _plain(hint, scalar, value, where) if scalar.read is None else _read(hint, scalar, value, where)
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, Enum)):
        return _chosen(list(arguments) or list(hint), value, where)
    if origin in (Union, types.UnionType):
        return _first_of(arguments, value, where, inner)
    kind = origin or hint
    if kind in (list, Sequence, Iterable, tuple):
        if not isinstance(value, list):
            raise _refusal(where, value, "a list")
        parts = _parts(kind, arguments, value, where)
        values = [_converted(part, each, f"{where}[{place}]", inner) for place, (part, each) in enumerate(parts)]
        return tuple(values) if kind is tuple else values
    if kind in (dict, Mapping):
        part = arguments[1] if arguments else Any
        return {name: _converted(part, each, f"{where}.{name}", inner) for name, each in _object(value, where).items()}
    if isinstance(hint, type) and (typing.is_typeddict(hint) or dataclasses.is_dataclass(hint) or attrs.has(hint)):
        return _instance(hint, _object(value, where), where, inner)
    return value


def _plain(kind: Any, scalar: ScalarType, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e308 else math.copysign(math.inf, value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is not kind:
        raise _refusal(where, value, scalar.expected)
    return value


def _read(kind: Any, scalar: ScalarType, value: Any, where: str) -> Any:
    """Read a value that is written as a string; a Decimal may also be a number."""
    if kind is decimal.Decimal and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise _refusal(where, value, scalar.expected)
    assert scalar.read is not None
    try:
        return scalar.read(value)
    except (ValueError, ArithmeticError):
        raise _refusal(where, value, scalar.expected) from None


def _chosen(choices: list[Any], value: Any, where: str) -> Any:
    values = [each.value if isinstance(each, Enum) else each for each in choices]
    for choice, each in zip(choices, values, strict=True):
        if type(each) is type(value) and each == value:
            return choice
    raise _refusal(where, value, "one of " + ", ".join(map(repr, values)))


def _first_of(hints: tuple[Any, ...], value: Any, where: str, depth: int) -> Any:
    refusals = []
    # Try the value's own type first: an integer stays an int, whatever the order of the union.
    exact = [hint for hint in hints if hint is type(value)]
    for hint in (*exact, *hints):
        try:
            return _converted(hint, value, where, depth)
        except ValueError as exc:
            if hint is not types.NoneType:
                refusals.append(exc)
    raise refusals[-1]


def _parts(kind: Any, arguments: tuple[Any, ...], values: list[Any], where: str) -> list[tuple[Any, Any]]:
    """Return the type and the value of each item."""
    if not arguments:
        return [(Any, each) for each in values]
    if kind is not tuple or arguments[-1] is ...:
        return [(arguments[0], each) for each in values]
    if len(arguments) != len(values):
        raise _refusal(where, values, f"a list of {len(arguments)}")
    return list(zip(arguments, values, strict=True))


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refusal(where, value, "an object")
    return value


def _instance(cls: Any, values: dict[str, Any], where: str, depth: int) -> Any:
    hints = typing.get_type_hints(cls, include_extras=True)
    # Check names and plain values first: they tell the types of a union apart before nested values are read, which
    # would otherwise be read once per type and level.
    if typing.is_typeddict(cls):
        for name in required_keys(cls, hints) - values.keys():
            raise ValueError(f"{where}.{name} is missing")
        for name in values.keys() - hints.keys():
            raise ValueError(f"{where} has no {name}")
    else:
        try:
            inspect.signature(cls).bind(**values)
        except TypeError as exc:
            raise ValueError(f"{where}: {exc}") from None
        hints = {name: hint for name, (hint, _) in arguments_of(cls, hints).items()}
    plain_first = sorted(values, key=lambda name: isinstance(values[name], dict | list))
    read = {name: _converted(hints.get(name, Any), values[name], f"{where}.{name}", depth) for name in plain_first}
    converted = {name: read[name] for name in values}
    return converted if typing.is_typeddict(cls) else cls(**converted)


def _refusal(where: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{where} = {value!r} is not {expected}"[:300])

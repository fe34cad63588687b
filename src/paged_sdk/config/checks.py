"""Validate settings: each validator raises :class:`ConfigError` naming the value and what is allowed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from os import PathLike, fsencode, fspath
from types import NoneType
from typing import Any

from attrs import Attribute

from paged_sdk.errors import ConfigError

MAX_PATH = 4096
"""Maximum length of a path: Linux's limit."""


def plain(value: Any) -> Any:
    """Return a number of another library, such as numpy's, as a Python int or float.

    Bools (numpy's too) and values that are not numbers are returned unchanged, for a validator to judge.
    """
    if isinstance(value, bool | str) or type(value) in (int, float, NoneType):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


# attrs derives a parameter's type from its converter: hence one function per type.
def as_int(value: int) -> int:
    """Return :func:`plain` ``(value)``."""
    number: int = plain(value)
    return number


def as_optional_int(value: int | None) -> int | None:
    """Return :func:`plain` ``(value)``."""
    number: int | None = plain(value)
    return number


def as_float(value: float) -> float:
    """Return :func:`plain` ``(value)``."""
    number: float = plain(value)
    return number


def as_optional_float(value: float | None) -> float | None:
    """Return :func:`plain` ``(value)``."""
    number: float | None = plain(value)
    return number


def as_tuple(value: Any) -> Any:
    """Return the items of a list, an array or another iterable as a tuple of Python values.

    A string becomes a tuple of one. Bytes, mappings and values that are not iterable are returned unchanged, for a
    validator to judge.
    """
    if isinstance(value, bytes | bytearray | memoryview | Mapping):
        return value
    if isinstance(value, str):
        return (value,)
    items = value.tolist() if callable(getattr(value, "tolist", None)) else value  # numpy's and torch's arrays
    return tuple(plain(item) for item in items) if isinstance(items, Iterable) else value


def path_text(setting: str, value: str | PathLike[str], allowed: str) -> str:
    """Return a path as text.

    :raises ConfigError: the value is not a path that the operating system can take
    """
    try:
        text = fspath(value)
        is_path = isinstance(text, str) and 0 < len(text) <= MAX_PATH and b"\0" not in fsencode(text)
    except (TypeError, UnicodeEncodeError):
        is_path = False
    if not is_path:
        raise ConfigError.of(setting, value, allowed)
    return text


def is_finite(value: object) -> bool:
    """Tell whether a value is a number (not a bool) that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int of hundreds of digits
        return False


def is_unicode(text: str) -> bool:
    """Tell whether a string can be encoded as UTF-8: lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def name_of(instance: object, attribute: Attribute[Any]) -> str:
    """Return a field's name for the text of an error: the builder's method if the class has ``call_of``."""
    name = attribute.alias or attribute.name
    call_of: Callable[[str], str] | None = getattr(instance, "call_of", None)
    return f"{type(instance).__name__}.{name}" if call_of is None else call_of(name)


class IsInt:
    """Accepts ints, but not bools."""

    def __call__(self, instance: object, attribute: Attribute[Any], value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError.of(name_of(instance, attribute), value, "an int")


class IntAtLeast:
    """Accepts an int (not a bool) of at least ``minimum`` and at most ``maximum``; None too if ``optional``."""

    def __init__(self, minimum: int, *, maximum: int | None = None, optional: bool = False) -> None:
        self.minimum = minimum
        self.maximum = maximum
        self.optional = optional

    def __call__(self, instance: object, attribute: Attribute[Any], value: object) -> None:
        if value is None and self.optional:
            return
        good = isinstance(value, int) and not isinstance(value, bool) and value >= self.minimum
        if not good or (self.maximum is not None and isinstance(value, int) and value > self.maximum):
            upper = "" if self.maximum is None else f" and <= {self.maximum}"
            allowed = f"an int >= {self.minimum}{upper}" + (" or None" if self.optional else "")
            raise ConfigError.of(name_of(instance, attribute), value, allowed)


class NumberBetween:
    """Accepts a finite number within bounds; an open bound is excluded. None too if ``optional``."""

    def __init__(
        self,
        low: float,
        high: float = math.inf,
        *,
        low_open: bool = False,
        optional: bool = False,
    ) -> None:
        self.low = low
        self.high = high
        self.low_open = low_open
        self.optional = optional

    def __call__(self, instance: object, attribute: Attribute[Any], value: object) -> None:
        if value is None and self.optional:
            return
        if is_finite(value):
            assert isinstance(value, int | float)
            if (value > self.low if self.low_open else value >= self.low) and value <= self.high:
                return
        raise ConfigError.of(name_of(instance, attribute), value, self.allowed())

    def allowed(self) -> str:
        """Say in words which numbers are accepted."""
        lower = f"{'>' if self.low_open else '>='} {self.low:g}"
        upper = "" if math.isinf(self.high) else f" and <= {self.high:g}"
        return f"a finite number {lower}{upper}" + (" or None" if self.optional else "")


def is_slowdown(instance: object, attribute: Attribute[Any], value: object) -> None:
    """Accept 0 and finite numbers above 1."""
    if not (is_finite(value) and isinstance(value, int | float) and (value == 0 or value > 1)):
        raise ConfigError.of(name_of(instance, attribute), value, "0, or a finite number > 1")


def is_optional_slowdown(instance: object, attribute: Attribute[Any], value: object) -> None:
    """Accept what :func:`is_slowdown` does, and None."""
    if value is not None:
        is_slowdown(instance, attribute, value)


def _members(kind: type[Enum]) -> str:
    """List an enumeration's members in words; from 8 members on by short names, to keep messages short."""
    names = [member.name for member in kind]
    return " or ".join(map(str, kind)) if len(names) < 8 else f"a member of {kind.__name__}: {', '.join(names)}"


class IsA:
    """Accepts instances of a class; None too if ``optional``.

    :param allowed: what is accepted, in words; by default the class's name, or its members if it is an enumeration
    """

    def __init__(self, kind: type | tuple[type, ...], allowed: str = "", *, optional: bool = False) -> None:
        if not allowed and isinstance(kind, type):
            allowed = _members(kind) if issubclass(kind, Enum) else kind.__name__
        self.kind: type | tuple[type, ...] = kind
        self.allowed: str = allowed + (" or None" if optional else "")
        self.optional = optional

    def __call__(self, instance: object, attribute: Attribute[Any], value: object) -> None:
        if not (isinstance(value, self.kind) or (value is None and self.optional)):
            raise ConfigError.of(name_of(instance, attribute), value, self.allowed)


is_bool: IsA = IsA(bool, "True or False")
is_optional_bool: IsA = IsA(bool, "True, False", optional=True)


class IsText:
    """Accepts strings of at least one character, without lone surrogates; None too if ``optional``."""

    def __init__(self, *, optional: bool = False) -> None:
        self.optional = optional

    def __call__(self, instance: object, attribute: Attribute[Any], value: object) -> None:
        if value is None and self.optional:
            return
        if not (isinstance(value, str) and value and is_unicode(value)):
            allowed = "a non-empty string of Unicode characters" + (" or None" if self.optional else "")
            raise ConfigError.of(name_of(instance, attribute), value, allowed)


def are_texts(instance: object, attribute: Attribute[Any], value: object) -> None:
    """Accept a tuple of non-empty strings without lone surrogates."""
    if not isinstance(value, tuple) or not all(isinstance(item, str) and item and is_unicode(item) for item in value):
        raise ConfigError.of(name_of(instance, attribute), value, "a list of non-empty strings of Unicode characters")


class AreFewTexts:
    """Accepts a tuple of strings as :func:`are_texts` does, up to a number and a total length: the engine's thread
    searches for each of them while other requests wait.
    """

    def __init__(self, max_number: int, max_characters: int) -> None:
        self.max_number = max_number
        self.max_characters = max_characters

    def __call__(self, instance: object, attribute: Attribute[Any], value: tuple[str, ...]) -> None:
        are_texts(instance, attribute, value)
        if len(value) > self.max_number or sum(map(len, value)) > self.max_characters:
            allowed = f"at most {self.max_number} strings, of {self.max_characters} characters together"
            raise ConfigError.of(name_of(instance, attribute), value, allowed)


def is_token_id(value: object) -> bool:
    """Tell whether a value can be a token's id: an int >= 0, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def are_token_ids(instance: object, attribute: Attribute[Any], value: object) -> None:
    """Accept a tuple of ints >= 0."""
    if not isinstance(value, tuple) or not all(map(is_token_id, value)):
        raise ConfigError.of(name_of(instance, attribute), value, "a list of token ids >= 0")

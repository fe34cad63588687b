"""Validates parameters of mistral.rs. Those of unsupported features are refused, except at their defaults: an error is
better than a setting without effect.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from attrs import Attribute, field

from paged_sdk import ConfigError
from paged_sdk.mistralrs.absent import PARAMETERS

__all__ = [
    "check_switches",
    "is_optional",
    "is_optional_count",
    "is_optional_text",
    "is_switch",
    "is_text",
    "refuse_settings",
    "unsupported",
]


def refuse_settings(default: bool | None = None, **settings: object) -> None:
    """Check that each of these settings is at its default.

    :param default: None, or False for switches
    :raises ConfigError: naming the first one that is not
    """
    for name, value in settings.items():
        if value is not default:
            reason = PARAMETERS.get(name, "this version has no such feature")
            allowed = f"{default}, or to leave it out: {reason}"
            raise ConfigError.of(name, value, allowed)


def unsupported(default: bool | None = None, *, kw_only: bool = False) -> Any:
    """Define a parameter that must be left out, or given as its default.

    :param default: None, or False for a switch
    """

    def validate(instance: object, attribute: Attribute[Any], value: object) -> None:
        refuse_settings(default, **{attribute.name: value})

    return field(default=default, validator=validate, kw_only=kw_only)


def is_optional(kind: type[Enum]) -> Callable[[object, Attribute[Any], object], None]:
    """Return a validator that accepts members of an enumeration and None."""

    def validate(instance: object, attribute: Attribute[Any], value: object) -> None:
        if value is not None and not isinstance(value, kind):
            raise ConfigError.of(
                attribute.name, value, f"a member of {kind.__name__}, such as {next(iter(kind))}, or None"
            )

    return validate


def check_switches(**switches: object) -> None:
    """Check that each of these settings is True or False.

    :raises ConfigError: naming the first that is not
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError.of(name, value, "True or False")


def is_switch(instance: object, attribute: Attribute[Any], value: object) -> None:
    """Accept True and False."""
    check_switches(**{attribute.name: value})


def is_text(instance: object, attribute: Attribute[Any], value: object) -> None:
    """Accept strings."""
    if not isinstance(value, str):
        raise ConfigError.of(attribute.name, value, "a string")


def is_optional_text(instance: object, attribute: Attribute[Any], value: object) -> None:
    """Accept strings and None."""
    if value is not None and not isinstance(value, str):
        raise ConfigError.of(attribute.name, value, "a string or None")


def is_optional_count(instance: object, attribute: Attribute[Any], value: object) -> None:
    """Accept None and ints >= 0."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ConfigError.of(attribute.name, value, "an int >= 0 or None")

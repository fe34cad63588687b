"""Refuse parameters of mistral.rs whose feature this version does not have: an error beats a setting that does
nothing. At their defaults, None or False, they may be given.
"""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field

from paged_sdk import ConfigError

__all__ = ["refuse_settings", "unsupported"]


def refuse_settings(**settings: object) -> None:
    """Check that none of these settings asks for anything.

    :raises ConfigError: naming the first that does
    """
    for name, value in settings.items():
        if value is not None and value is not False:
            raise ConfigError.of(name, value, "nothing: this version has no such feature; leave it out")


def unsupported(default: bool | None = None) -> Any:
    """Define a parameter that must be left out, or given as its default.

    :param default: None, or False for a switch
    """

    def validate(instance: object, attribute: Attribute[Any], value: object) -> None:
        refuse_settings(**{attribute.name: value})

    return field(default=default, validator=validate)

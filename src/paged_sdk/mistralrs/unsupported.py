"""Refuse parameters of mistral.rs whose feature this version does not have: an error beats a setting that does
nothing.
"""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field

from paged_sdk import ConfigError, InvalidRequestError

__all__ = ["refuse_settings", "unsupported_field", "unsupported_setting"]


def _message(name: str, value: object) -> str:
    return f"{name} = {value!r}: this version has no such feature; leave it out"


def refuse_settings(**settings: object) -> None:
    """Check that none of these settings asks for anything.

    :raises ConfigError: naming the first that does
    """
    for name, value in settings.items():
        if value:
            raise ConfigError(_message(name, value), setting=name, value=value)


def unsupported_setting() -> Any:
    """Define a field of a model's description that must be left out."""

    def validate(instance: object, attribute: Attribute[Any], value: object) -> None:
        refuse_settings(**{attribute.name: value})

    return field(default=None, validator=validate)


def unsupported_field() -> Any:
    """Define a field of a request that must be left out."""

    def validate(instance: object, attribute: Attribute[Any], value: object) -> None:
        if value:
            raise InvalidRequestError(_message(attribute.name, value), field=attribute.name, value=value)

    return field(default=None, validator=validate)

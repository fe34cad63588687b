"""Say which adapters a model is loaded with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from attrs import Attribute, field, frozen

from paged_sdk import ConfigError, GgufModelBuilder, TextModelBuilder
from paged_sdk.mistralrs.unsupported import is_text, unsupported

__all__ = ["LoraAdapter", "LoraAdapterInfo", "adapters_field", "limit_field", "with_adapters"]

_Builder = TypeVar("_Builder", TextModelBuilder, GgufModelBuilder)


@frozen
class LoraAdapter:
    """Names an adapter.

    :ivar alias: what requests call it
    :ivar source: a directory as PEFT saves it, a GGUF file, or a hub id
    """

    alias: str = field(validator=is_text)
    source: str
    revision: None = unsupported()


@frozen
class LoraAdapterInfo:
    """Describes a loaded adapter.

    :ivar alias: what requests call it
    :ivar source: where it was read
    """

    alias: str
    source: str


def _are_adapters(instance: object, attribute: Attribute[Any], value: object) -> None:
    if value is None:
        return
    if not isinstance(value, list | tuple) or not all(isinstance(each, LoraAdapter) for each in value):
        raise ConfigError.of(attribute.name, value, "a list of LoraAdapter(alias, source), or None")


def adapters_field(*, kw_only: bool = False) -> Any:
    """Define a parameter that lists adapters."""
    return field(default=None, validator=_are_adapters, kw_only=kw_only)


def limit_field(default: int, *, kw_only: bool = False) -> Any:
    """Define a limit of mistral.rs's on adapters, which there is none of here: it must be left out, or given as its
    default.
    """

    def validate(instance: object, attribute: Attribute[Any], value: object) -> None:
        if type(value) is not int or value != default:
            allowed = f"{default}: this version does not limit adapters; leave it out"
            raise ConfigError.of(attribute.name, value, allowed)

    return field(default=default, validator=validate, kw_only=kw_only)


def with_adapters(builder: _Builder, adapters: Sequence[LoraAdapter] | None) -> _Builder:
    """Return a builder that loads adapters, too.

    :raises ConfigError: two have one alias
    """
    for adapter in adapters or ():
        builder = builder.with_adapter(adapter.source, name=adapter.alias)
    return builder

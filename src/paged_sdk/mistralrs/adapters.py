"""Defines mistral.rs's classes that name and describe LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from attrs import Attribute, field, frozen

from paged_sdk import ConfigError, GgufModelBuilder, TextModelBuilder
from paged_sdk.mistralrs.unsupported import is_text, unsupported

__all__ = [
    "LoraAdapter",
    "LoraAdapterError",
    "LoraAdapterGeneration",
    "LoraAdapterInfo",
    "LoraResidentGenerationInfo",
    "LoraRuntimeStatus",
    "adapters_field",
    "is_selection",
    "limit_field",
    "with_adapters",
]

_Builder = TypeVar("_Builder", TextModelBuilder, GgufModelBuilder)


class LoraAdapterError(ConfigError):
    """An adapter cannot be loaded, replaced or unloaded.

    :ivar code: why, in a word that programs can compare, as mistral.rs has them: "lora_adapter_already_loaded",
        "lora_adapter_not_found", "lora_generation_mismatch", "lora_rank_limit_exceeded" ...
    """

    def __init__(self, message: str, *, code: str = "internal_error", setting: str = "", value: object = None) -> None:
        super().__init__(message, setting=setting, value=value)
        self.code = code


@frozen
class LoraAdapter:
    """Names an adapter.

    :ivar alias: its name for requests
    :ivar source: a PEFT directory, a GGUF file, or a Hub id
    """

    alias: str = field(validator=is_text)
    source: str
    revision: None = unsupported()


def _is_generation(instance: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, str) or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise ConfigError.of("generation", value, "64 hexadecimal digits")


@frozen
class LoraAdapterGeneration:
    """Selects one exact content of an adapter for a request.

    :ivar generation: 64 hexadecimal digits, as in :class:`LoraAdapterInfo`
    """

    generation: str = field(validator=_is_generation)


def is_selection(instance: object, attribute: Attribute[Any], value: object) -> None:
    """Accept an alias, a generation, or None."""
    if value is not None and not isinstance(value, str | LoraAdapterGeneration):
        raise ConfigError.of(attribute.name, value, "an alias, a LoraAdapterGeneration, or None")


@frozen
class LoraAdapterInfo:
    """Describes a loaded adapter.

    :ivar alias: its name for requests
    :ivar source: where it was read from
    :ivar revision: always None: there are no revisions here
    :ivar generation: a hash of its content
    :ivar rank: the largest rank among its updates
    :ivar bytes: the memory that its matrices take
    """

    alias: str
    source: str
    revision: None = field(kw_only=True, default=None)
    generation: str = field(kw_only=True)
    rank: int = field(kw_only=True)
    bytes: int = field(kw_only=True)

    def exact(self) -> LoraAdapterGeneration:
        """Return what selects this content in a request."""
        return LoraAdapterGeneration(self.generation)


@frozen(kw_only=True)
class LoraResidentGenerationInfo:
    """Describes a content in memory, which may no longer have an alias.

    :ivar aliases: its names for requests
    :ivar retired: whether it will be freed once running requests have ended
    :ivar active_leases: number of running requests
    """

    generation: str
    aliases: list[str]
    rank: int
    bytes: int
    retired: bool
    active_leases: int


@frozen(kw_only=True)
class LoraRuntimeStatus:
    """Describes the adapters of a model, and their limits.

    :ivar adapters: those that requests may name
    :ivar generations: all that are in memory
    """

    adapters: list[LoraAdapterInfo]
    generations: list[LoraResidentGenerationInfo]
    resident_generations: int
    retired_generations: int
    resident_bytes: int
    max_adapters: int
    max_rank: int
    max_bytes: int


def _are_adapters(instance: object, attribute: Attribute[Any], value: object) -> None:
    if value is None:
        return
    if not isinstance(value, list | tuple) or not all(isinstance(each, LoraAdapter) for each in value):
        raise ConfigError.of(attribute.name, value, "a list of LoraAdapter(alias, source), or None")


def adapters_field(*, kw_only: bool = False) -> Any:
    """Define a parameter that lists adapters."""
    return field(default=None, validator=_are_adapters, kw_only=kw_only)


def _is_limit(instance: object, attribute: Attribute[Any], value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError.of(attribute.name, value, "an int >= 1")


def limit_field(default: int, *, kw_only: bool = False) -> Any:
    """Define a limit on adapters."""
    return field(default=default, validator=_is_limit, kw_only=kw_only)


def with_adapters(builder: _Builder, adapters: Sequence[LoraAdapter] | None) -> _Builder:
    """Return the builder with adapters to load.

    :raises ConfigError: two adapters have the same alias
    """
    for adapter in adapters or ():
        builder = builder.with_adapter(adapter.source, name=adapter.alias)
    return builder

"""Set the size of the paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from paged_sdk.config.checks import IntAtLeast, NumberBetween, as_float, as_int
from paged_sdk.errors import ConfigError

__all__ = ["MemoryGpuConfig"]

LARGEST = 2**53
"""The largest size: floats, in which sizes are shown, represent integers exactly up to here."""


class MemoryGpuConfig:
    """Sets the size of the KV pool, in one of three ways; each is a subclass, so ``match`` can tell them apart.

    - ``MemoryGpuConfig.ContextSize(tokens)``: room for that many tokens, over all sequences
    - ``MemoryGpuConfig.Fraction(fraction)``: that fraction of the device's memory, minus what is in use once the
      weights are loaded
    - ``MemoryGpuConfig.MB(megabytes)``: that many MiB
    """

    __slots__ = ()

    if TYPE_CHECKING:
        ContextSize: type[ContextSize]
        Fraction: type[Fraction]
        MB: type[MB]

    # Only the three subclasses, which have their own constructors, can be instantiated.
    def __init__(self, *args: object, **fields: object) -> None:
        given = fields or (args[0] if len(args) == 1 else args)
        raise ConfigError.of("MemoryGpuConfig", given, ".ContextSize(tokens), .Fraction(fraction) or .MB(megabytes)")


@frozen
class ContextSize(MemoryGpuConfig):
    """Sets the size of the pool in tokens.

    :ivar tokens: tokens that fit into the pool, rounded up to whole blocks
    """

    tokens: int = field(converter=as_int, validator=IntAtLeast(1, maximum=LARGEST))


@frozen
class Fraction(MemoryGpuConfig):
    """Sets the size of the pool as a fraction of the device's memory.

    :ivar fraction: fraction of the device's total memory, above 0 and at most 1
    """

    fraction: float = field(converter=as_float, validator=NumberBetween(0, 1, low_open=True))


@frozen
class MB(MemoryGpuConfig):
    """Sets the size of the pool in MiB.

    :ivar megabytes: size of the pool in MiB (2**20 bytes)
    """

    megabytes: int = field(converter=as_int, validator=IntAtLeast(1, maximum=LARGEST))


for _variant in (ContextSize, Fraction, MB):
    # Shown as MemoryGpuConfig.MB, for example, in reprs and tracebacks.
    _variant.__qualname__ = f"MemoryGpuConfig.{_variant.__name__}"
    setattr(MemoryGpuConfig, _variant.__name__, _variant)

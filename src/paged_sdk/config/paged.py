"""Define the settings of the paged KV cache."""

from __future__ import annotations

from enum import Enum
from typing import Any

from attrs import Attribute, evolve, field, frozen

from paged_sdk.config.memory import MemoryGpuConfig
from paged_sdk.errors import ConfigError

__all__ = ["PagedAttentionMeta", "PagedAttentionMetaBuilder", "PagedCacheType"]

MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 1, 1024


class PagedCacheType(Enum):
    """Says how a KV element is stored."""

    AUTO = "auto"
    """Stores elements in the model's own dtype."""
    F8E4M3 = "f8e4m3"
    """Stores 8-bit floats (4 exponent, 3 mantissa bits) with one float32 scale per token and KV head."""

    @classmethod
    def parse(cls, text: str, *, setting: str = "cache_type") -> PagedCacheType:
        """Read a flag's or variable's text.

        :raises ConfigError: naming ``setting``
        """
        try:
            return cls(text.strip().lower())
        except ValueError:
            raise ConfigError.of(setting, text, " or ".join(member.value for member in cls)) from None


def _is_cache_type(instance: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, PagedCacheType):
        allowed = " or ".join(str(member) for member in PagedCacheType)
        raise ConfigError.of(f"{type(instance).__name__}.{attribute.name}", value, allowed)


def _is_block_size(instance: object, attribute: Attribute[Any], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not MIN_BLOCK_SIZE <= value <= MAX_BLOCK_SIZE:
        raise ConfigError.of(
            f"{type(instance).__name__}.{attribute.name}",
            value,
            f"an int from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}",
        )


def _is_memory(instance: object, attribute: Attribute[Any], value: object) -> None:
    if value is not None and not isinstance(value, MemoryGpuConfig):
        raise ConfigError.of(
            f"{type(instance).__name__}.{attribute.name}",
            value,
            "MemoryGpuConfig.ContextSize(tokens), .Fraction(fraction), .MB(megabytes) or None",
        )


@frozen(kw_only=True)
class PagedAttentionMeta:
    """Holds the settings of the paged KV cache.

    :ivar block_size: tokens per block
    :ivar gpu_memory: size of the pool; None lets the engine choose: nine tenths of a CUDA device, on CPU capacity for
        ``max_num_seqs`` sequences of up to 4096 tokens within a quarter of the memory that the process may use
    :ivar cache_type: the type that a KV element is stored as
    :raises ConfigError: at construction
    """

    block_size: int = field(default=32, validator=_is_block_size)
    gpu_memory: MemoryGpuConfig | None = field(default=None, validator=_is_memory)
    cache_type: PagedCacheType = field(default=PagedCacheType.AUTO, validator=_is_cache_type)


@frozen
class PagedAttentionMetaBuilder:
    """Builds :class:`PagedAttentionMeta` one setting at a time; every ``with_*`` returns a new builder."""

    _meta: PagedAttentionMeta = PagedAttentionMeta()

    def with_block_size(self, block_size: int) -> PagedAttentionMetaBuilder:
        return PagedAttentionMetaBuilder(evolve(self._meta, block_size=block_size))

    def with_gpu_memory(self, gpu_memory: MemoryGpuConfig) -> PagedAttentionMetaBuilder:
        return PagedAttentionMetaBuilder(evolve(self._meta, gpu_memory=gpu_memory))

    def with_cache_type(self, cache_type: PagedCacheType) -> PagedAttentionMetaBuilder:
        return PagedAttentionMetaBuilder(evolve(self._meta, cache_type=cache_type))

    def build(self) -> PagedAttentionMeta:
        return self._meta

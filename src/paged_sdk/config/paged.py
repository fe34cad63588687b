"""Define the settings of the paged KV cache."""

from __future__ import annotations

from enum import Enum

from attrs import evolve, field, frozen

from paged_sdk.config.checks import IntAtLeast, IsA, as_int
from paged_sdk.config.memory import MemoryGpuConfig
from paged_sdk.errors import ConfigError

__all__ = ["PagedAttentionMeta", "PagedAttentionMetaBuilder", "PagedCacheType"]

MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 1, 1024
MEMORY = "MemoryGpuConfig.ContextSize(tokens), .Fraction(fraction), .MB(megabytes)"


class PagedCacheType(Enum):
    """Names the types of KV elements."""

    AUTO = "auto"
    """Stores elements in the model's own dtype."""
    F8E4M3 = "f8e4m3"
    """Stores 8-bit floats (4 exponent, 3 mantissa bits) with one float32 scale per token and KV head."""
    Q4 = "q4"
    """Stores 4-bit codes with a scale and a minimum per 32 elements, in a basis in which rounding costs least."""

    @classmethod
    def parse(cls, text: str, *, setting: str = "cache_type") -> PagedCacheType:
        """Read a flag's or variable's text.

        :raises ConfigError: naming ``setting``
        """
        named = {member.value: member for member in cls}
        found = named.get(text.strip().lower()) if isinstance(text, str) else None
        if found is None:
            raise ConfigError.of(setting, text, " or ".join(named))
        return found


@frozen(kw_only=True)
class PagedAttentionMeta:
    """Holds the settings of the paged KV cache.

    :ivar block_size: tokens per block
    :ivar gpu_memory: size of the pool; None: nine tenths of a CUDA device's memory; on the CPU, room for
        ``max_num_seqs`` sequences of up to 4096 tokens, within a quarter of the memory that the process may use
    :ivar cache_type: the type of KV elements
    :raises ConfigError: at construction
    """

    block_size: int = field(default=32, converter=as_int, validator=IntAtLeast(MIN_BLOCK_SIZE, maximum=MAX_BLOCK_SIZE))
    gpu_memory: MemoryGpuConfig | None = field(default=None, validator=IsA(MemoryGpuConfig, MEMORY, optional=True))
    cache_type: PagedCacheType = field(default=PagedCacheType.AUTO, validator=IsA(PagedCacheType))


@frozen
class PagedAttentionMetaBuilder:
    """Builds :class:`PagedAttentionMeta` one setting at a time; every ``with_*`` returns a new builder."""

    _meta: PagedAttentionMeta = field(default=PagedAttentionMeta(), validator=IsA(PagedAttentionMeta))

    def with_block_size(self, block_size: int) -> PagedAttentionMetaBuilder:
        """Set the number of tokens per block.

        :raises ConfigError: for anything but 1 to 1024
        """
        return PagedAttentionMetaBuilder(evolve(self._meta, block_size=block_size))

    def with_gpu_memory(self, gpu_memory: MemoryGpuConfig | None) -> PagedAttentionMetaBuilder:
        """Set the size of the KV pool; None lets the engine choose.

        :raises ConfigError: for anything but one of the three kinds of :class:`MemoryGpuConfig`
        """
        return PagedAttentionMetaBuilder(evolve(self._meta, gpu_memory=gpu_memory))

    def with_cache_type(self, cache_type: PagedCacheType) -> PagedAttentionMetaBuilder:
        """Set the type of KV elements.

        :raises ConfigError: for anything but a :class:`PagedCacheType`
        """
        return PagedAttentionMetaBuilder(evolve(self._meta, cache_type=cache_type))

    def build(self) -> PagedAttentionMeta:
        """Return the settings."""
        return self._meta

"""Define the settings of the directory that keeps the prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attrs import field, frozen

from paged_sdk.config.checks import IntAtLeast, IsA, as_int

__all__ = ["DEFAULT_MAX_BYTES", "PrefixCacheDir"]

DEFAULT_MAX_BYTES: Final = 8 << 30
"""8 GiB: some 300,000 tokens of Qwen2.5-1.5B in bfloat16, or 65,000 of Llama-3.1-8B."""


@frozen
class PrefixCacheDir:
    """Says where the prefix cache's blocks are stored outside the pool.

    :ivar path: the directory
    :ivar max_bytes: its size, from which on the blocks that were unused for longest are removed
    :raises ConfigError: at construction
    """

    path: Path = field(validator=IsA(Path))
    max_bytes: int = field(default=DEFAULT_MAX_BYTES, converter=as_int, validator=IntAtLeast(1))

"""What a pool of KV blocks is made of, whichever backend serves it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.config.paged import PagedCacheType

__all__ = ["PoolSettings"]


@frozen(kw_only=True)
class PoolSettings:
    """All but the number of blocks.

    :ivar block_size: tokens per block
    :ivar dtype: of keys and values
    :ivar cache_type: ``AUTO`` stores ``dtype``; ``F8E4M3`` bytes with a float32 scale per token and KV head
    :ivar key_offsets: of each layer ``[num_spans, num_kv_heads, head_dim]`` float32, as far as the longest context:
        what its keys are stored without (:mod:`paged_sdk.kernels.key_offsets`). For ``F8E4M3`` only; empty: nothing
    """

    block_size: int
    dtype: torch.dtype
    device: torch.device
    cache_type: PagedCacheType = PagedCacheType.AUTO
    key_offsets: Sequence[Tensor] = ()

    @property
    def quantized(self) -> bool:
        """Scales are kept beside keys and values."""
        return self.cache_type is PagedCacheType.F8E4M3

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of what lies in the pool."""
        return torch.float8_e4m3fn if self.quantized else self.dtype

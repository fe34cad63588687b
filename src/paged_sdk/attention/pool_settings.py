"""Describes a pool of KV blocks, for all paged backends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.config.paged import PagedCacheType

__all__ = ["PoolSettings"]


@frozen(kw_only=True)
class PoolSettings:
    """Holds the settings of a KV pool, except its number of blocks.

    :ivar block_size: tokens per block
    :ivar dtype: dtype of keys and values
    :ivar cache_type: ``AUTO`` stores ``dtype``; ``F8E4M3`` stores bytes with a float32 scale per token and KV head
    :ivar key_offsets: per layer ``[num_spans, num_kv_heads, head_dim]`` float32, up to the longest context: the offsets
        that are subtracted from stored keys (:mod:`paged_sdk.kernels.key_offsets`). For ``F8E4M3`` only; empty: no
        offsets
    """

    block_size: int
    dtype: torch.dtype
    device: torch.device
    cache_type: PagedCacheType = PagedCacheType.AUTO
    key_offsets: Sequence[Tensor] = ()

    @property
    def quantized(self) -> bool:
        """Return whether keys and values are stored as codes with scales."""
        return self.cache_type is PagedCacheType.F8E4M3

    @property
    def stored_dtype(self) -> torch.dtype:
        """Return the dtype of the pool's elements."""
        return torch.float8_e4m3fn if self.quantized else self.dtype

"""Describes a pool of KV blocks, for all paged backends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.checks import scales_of
from paged_sdk.kernels.key_offsets import KEY_SPAN
from paged_sdk.kernels.kv_basis import KvBasis

__all__ = ["PoolSettings"]


@frozen(kw_only=True)
class PoolSettings:
    """Holds the settings of a KV pool, except its number of blocks.

    :ivar block_size: tokens per block
    :ivar dtype: dtype of keys and values
    :ivar cache_type: ``AUTO`` stores ``dtype``; the others store codes with scales
    :ivar key_offsets: per layer that keeps keys ``[num_spans, num_kv_heads, head_dim]`` float32, up to the longest
        context: the offsets that are subtracted from stored keys (:mod:`paged_sdk.kernels.key_offsets`). For codes
        only; empty: no offsets
    :ivar bases: per layer that keeps keys, the basis of stored keys and values, in which the offsets are too; empty:
        the heads' own
    :ivar num_scratch: number of blocks, the last ones, that are not handed out in order
    """

    block_size: int
    dtype: torch.dtype
    device: torch.device
    cache_type: PagedCacheType = PagedCacheType.AUTO
    key_offsets: Sequence[Tensor] = ()
    bases: Sequence[KvBasis] = ()
    num_scratch: int = 0

    @property
    def stored_dtype(self) -> torch.dtype:
        """Return the dtype of the pool's elements."""
        return {PagedCacheType.F8E4M3: torch.float8_e4m3fn, PagedCacheType.Q4: torch.uint8}.get(
            self.cache_type, self.dtype
        )

    @property
    def bytes_per_element(self) -> float:
        """Return the bytes of a key's or value's element, without scales."""
        return 0.5 if self.cache_type is PagedCacheType.Q4 else self.stored_dtype.itemsize

    def up_to(self, num_positions: int) -> PoolSettings:
        """Return the same for sequences of that many positions at most: without the key offsets of later ones."""
        spans = -(-num_positions // KEY_SPAN)
        if not self.key_offsets or len(self.key_offsets[0]) <= spans:
            return self
        return evolve(self, key_offsets=tuple(each[:spans].clone() for each in self.key_offsets))

    def pages(
        self,
        layer: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        values_are_keys: bool = False,
        key_only: int = 0,
    ) -> LayerCache:
        """Allocate the pages of a layer.

        :param layer: the layer's number among those that keep keys
        :param values_are_keys: whether the layer keeps only keys, which are its values, too
        :param key_only: see :attr:`~paged_sdk.kernels.attention_inputs.LayerCache.key_only`
        :raises RuntimeError: torch cannot allocate them
        :raises ConfigError: ``head_dim``, the offsets or the basis do not fit
        """
        dtype = self.stored_dtype
        shape = (num_blocks, self.block_size, num_kv_heads, head_dim // 2 if dtype == torch.uint8 else head_dim)
        key, value = _pair(shape, dtype, self.device, is_one=values_are_keys)
        basis = self.bases[layer] if self.bases else None
        if self.cache_type is PagedCacheType.AUTO:
            return LayerCache(key, value, basis=basis, key_only=key_only)
        of_scales, (scale_dtype,) = scales_of(shape, dtype)
        k_scale, v_scale = _pair(of_scales, scale_dtype, self.device, is_one=values_are_keys)
        offsets = self.key_offsets[layer] if self.key_offsets else None
        return LayerCache(key, value, k_scale, v_scale, offsets, basis, key_only)


def _pair(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, is_one: bool) -> tuple[Tensor, Tensor]:
    """Allocate a tensor for keys and one for values, or one for both."""
    key = torch.empty(shape, dtype=dtype, device=device)
    return key, key if is_one else torch.empty_like(key)

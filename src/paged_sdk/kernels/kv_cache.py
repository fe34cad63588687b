"""Reading and writing a paged KV cache.

A cache of keys or values is ``[num_blocks, block_size, num_kv_heads, head_size]``; token ``i`` of block ``b`` is slot
``b * block_size + i``. A cache in f8e4m3 comes with scales ``[num_blocks, block_size, num_kv_heads]`` in float32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paged_sdk.kernels.fp8 import dequantise_f8e4m3, quantise_f8e4m3

__all__ = ["copy_block", "gather_slots", "reshape_and_cache"]


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots.

    :param key: ``[num_tokens, num_kv_heads, head_size]``; ``value`` likewise
    :param key_cache: changed in place; ``value_cache`` likewise
    :param slot_mapping: ``[num_tokens]`` int64, no slot twice
    :param k_scale: scales of an f8e4m3 cache, changed in place; None: the cache has the dtype of ``key``
    """
    for new, cache, scales in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        slots = cache.flatten(0, 1)
        if scales is None:
            slots.index_copy_(0, slot_mapping, new)
        else:
            codes, scale = quantise_f8e4m3(new)
            slots.view(torch.uint8).index_copy_(0, slot_mapping, codes.view(torch.uint8))
            scales.flatten(0, 1).index_copy_(0, slot_mapping, scale)


def gather_slots(cache: Tensor, slots: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Read the vectors of some slots.

    :param slots: ``[...]`` int64
    :param scales: of an f8e4m3 cache, else None
    :param dtype: what to decode an f8e4m3 cache to
    :returns: ``[..., num_kv_heads, head_size]``, contiguous
    """
    index = slots.flatten()
    if scales is None:
        vectors = cache.flatten(0, 1).index_select(0, index)
    else:
        codes = cache.view(torch.int8).flatten(0, 1).index_select(0, index).view(torch.float8_e4m3fn)
        vectors = dequantise_f8e4m3(codes, scales.flatten(0, 1).index_select(0, index), dtype)
    return vectors.view(*slots.shape, *vectors.shape[1:])


def copy_block(caches: Iterable[Tensor], source: int, target: int) -> None:
    """Copy one whole block, in each of the given caches and scales."""
    for cache in caches:
        cache[target].copy_(cache[source])

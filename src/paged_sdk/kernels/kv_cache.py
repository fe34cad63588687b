"""Reading and writing a paged KV cache.

A cache of keys or values is ``[num_blocks, block_size, num_kv_heads, head_size]``; token ``i`` of block ``b`` is slot
``b * block_size + i``. A cache in f8e4m3 comes with scales ``[num_blocks, block_size, num_kv_heads]`` in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paged_sdk.kernels.fp8 import dequantise_f8e4m3, quantise_f8e4m3

__all__ = ["copy_block", "copy_blocks_reference", "gather_slots", "reshape_and_cache_reference", "write_slots"]


def write_slots(
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
    :param slot_mapping: ``[num_tokens]`` int64, no slot twice, none negative
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


def reshape_and_cache_reference(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots, by torch's operations.

    :param key: ``[num_tokens, num_kv_heads, head_size]``; ``value`` likewise
    :param key_cache: ``[num_blocks, block_size, num_kv_heads, head_size]`` of the dtype of ``key`` or float8_e4m3fn,
        changed in place; ``value_cache`` likewise
    :param slot_mapping: ``[num_tokens]`` int64, ``block * block_size + offset``, no slot twice; a token whose slot is
        negative (padding) is not written
    :param k_scale: ``[num_blocks, block_size, num_kv_heads]`` float32, changed in place, for an f8e4m3 cache only;
        ``v_scale`` likewise. Quantisation is that of :func:`~paged_sdk.kernels.fp8.quantise_f8e4m3`: a scale per token
        and head
    """
    kept = slot_mapping >= 0
    write_slots(key[kept], value[kept], key_cache, value_cache, slot_mapping[kept], k_scale, v_scale)


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


def copy_blocks_reference(
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    block_pairs: Tensor,
    k_scales: Sequence[Tensor] = (),
    v_scales: Sequence[Tensor] = (),
) -> None:
    """Copy whole blocks within each cache: copy-on-write for any number of blocks and layers, by torch's operations.

    :param key_caches: one ``[num_blocks, block_size, num_kv_heads, head_size]`` per layer, changed in place;
        ``value_caches`` likewise
    :param block_pairs: ``[num_pairs, 2]`` int64 (source, target), on the caches' device. A block is a target at most
        once, and no target is a source: the pairs are independent, in whatever order they are done
    :param k_scales: one ``[num_blocks, block_size, num_kv_heads]`` float32 per layer of f8e4m3 caches, else none;
        ``v_scales`` likewise
    """
    sources, targets = block_pairs.unbind(1)
    for cache in (*key_caches, *value_caches, *k_scales, *v_scales):
        # Bytes: not every device indexes f8e4m3.
        blocks = cache.view(torch.uint8)
        blocks.index_copy_(0, targets, blocks.index_select(0, sources))

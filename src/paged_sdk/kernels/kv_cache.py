"""Reads and writes a paged KV cache.

A cache of keys or values is ``[num_blocks, block_size, num_kv_heads, head_dim]``; token ``i`` of block ``b`` is slot
``b * block_size + i``. A cache in f8e4m3 comes with scales ``[num_blocks, block_size, num_kv_heads]`` in float32.

:func:`reshape_and_cache` and :func:`copy_blocks` are custom ops; Triton serves them on CUDA, and their references
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.checks import FLOATS, check_block_pairs, check_cache, check_slots, check_tensor
from paged_sdk.kernels.fallback import device_of, runs_on_triton, why_not_triton
from paged_sdk.kernels.fp8 import dequantize_f8e4m3, quantize_f8e4m3
from paged_sdk.kernels.key_offsets import add_key_offsets, subtract_key_offsets
from paged_sdk.kernels.q4 import dequantize_q4, quantize_q4

__all__ = [
    "copy_block",
    "copy_blocks",
    "copy_blocks_reference",
    "gather_decoded",
    "gather_slots",
    "reshape_and_cache",
    "reshape_and_cache_reference",
    "write_slots",
]


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

    The custom op is ``torch.ops.paged_sdk.reshape_and_cache``.

    :param key: ``[num_tokens, num_kv_heads, head_dim]`` float32, float16 or bfloat16; ``value`` likewise
    :param key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]`` of the dtype of ``key`` or float8_e4m3fn,
        contiguous, changed in place; ``value_cache`` likewise
    :param slot_mapping: ``[num_tokens]`` int64, ``block * block_size + offset``, no slot twice; a token whose slot is
        negative (padding) is not written
    :param k_scale: ``[num_blocks, block_size, num_kv_heads]`` float32, changed in place, for an f8e4m3 cache only;
        ``v_scale`` likewise. Quantization is that of :func:`~paged_sdk.kernels.fp8.quantize_f8e4m3`: a scale per token
        and head
    :raises ConfigError: shapes, dtypes, strides or devices do not fit; for tensors in CPU memory, also slots past the
        cache's end
    """
    _reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)


@torch.library.custom_op(
    "paged_sdk::reshape_and_cache", mutates_args=("key_cache", "value_cache", "k_scale", "v_scale")
)
def _reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    check_tensor("key", key, ("num_tokens", "num_kv_heads", "head_dim"), FLOATS, key.device)
    check_tensor("value", value, tuple(key.shape), (key.dtype,), key.device)
    check_cache(key_cache, value_cache, k_scale, v_scale, key)
    if key_cache.shape[2] != key.shape[1]:
        raise ConfigError.of("key.shape", tuple(key.shape), f"num_kv_heads = {key_cache.shape[2]}, as in the cache")
    check_tensor("slot_mapping", slot_mapping, (len(key),), (torch.int64,), key.device)
    if key.device.type == "cpu":
        check_slots(slot_mapping, key_cache.shape[0] * key_cache.shape[1])
    if runs_on_triton("reshape_and_cache", key):
        from paged_sdk.kernels.triton import kv_cache as triton_kernels

        with device_of(key):
            triton_kernels.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    else:
        reshape_and_cache_reference(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)


@_reshape_and_cache.register_fake
def _reshape_and_cache_fake(*_: object) -> None:
    return None


def copy_blocks(
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    block_pairs: Tensor,
    k_scales: Sequence[Tensor] = (),
    v_scales: Sequence[Tensor] = (),
) -> None:
    """Copy whole blocks within each cache: copy-on-write for any number of blocks and layers.

    The custom op is ``torch.ops.paged_sdk.copy_blocks``.

    :param key_caches: one ``[num_blocks, block_size, num_kv_heads, head_dim]`` per layer, all alike, contiguous,
        changed in place; ``value_caches`` likewise
    :param block_pairs: ``[num_pairs, 2]`` int64 (source, target), on the caches' device or in CPU memory. A block is a
        target at most once, and no target is a source, so the order of the pairs does not matter
    :param k_scales: one ``[num_blocks, block_size, num_kv_heads]`` float32 per layer of f8e4m3 caches, else none;
        ``v_scales`` likewise
    :raises ConfigError: shapes, dtypes, strides or devices do not fit; for pairs in CPU memory, also blocks that do not
        exist and pairs that are not independent
    """
    _copy_blocks(list(key_caches), list(value_caches), block_pairs, list(k_scales), list(v_scales))


@torch.library.custom_op("paged_sdk::copy_blocks", mutates_args=("key_caches", "value_caches", "k_scales", "v_scales"))
def _copy_blocks(
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    block_pairs: Tensor,
    k_scales: Sequence[Tensor],
    v_scales: Sequence[Tensor],
) -> None:
    num_layers = len(key_caches)
    if num_layers == 0 or len(value_caches) != num_layers:
        raise ConfigError.of("key_caches", f"{num_layers} with {len(value_caches)} value caches", "one each per layer")
    first = key_caches[0]
    if len(k_scales) != len(v_scales) or len(k_scales) not in (0, num_layers):
        raise ConfigError.of("k_scales", f"{len(k_scales)} with {len(v_scales)} v_scales", "none, or one per layer")
    like = first.new_empty((0, *first.shape[2:]))
    scales = zip(k_scales, v_scales, strict=True) if k_scales else ((None, None),) * num_layers
    for key_cache, value_cache, (k_scale, v_scale) in zip(key_caches, value_caches, scales, strict=True):
        check_tensor("key_caches", key_cache, tuple(first.shape), (first.dtype,), first.device)
        check_cache(key_cache, value_cache, k_scale, v_scale, like)
    check_tensor("block_pairs", block_pairs, ("num_pairs", 2), (torch.int64,), block_pairs.device)
    if block_pairs.device.type == "cpu":
        check_block_pairs(block_pairs, len(first))
    elif block_pairs.device != first.device:
        raise ConfigError.of("block_pairs.device", str(block_pairs.device), f"{first.device} or cpu")
    if len(block_pairs) == 0:
        return
    # Only CUDA may copy asynchronously: elsewhere nothing keeps the host memory alive until the copy is done.
    pairs = block_pairs.to(first.device, non_blocking=first.is_cuda)
    if runs_on_triton("copy_blocks", first):
        from paged_sdk.kernels.triton import kv_cache as triton_kernels

        with device_of(first):
            triton_kernels.copy_blocks([*key_caches, *value_caches, *k_scales, *v_scales], pairs)
    else:
        copy_blocks_reference(key_caches, value_caches, pairs, k_scales, v_scales)


@_copy_blocks.register_fake
def _copy_blocks_fake(*_: object) -> None:
    return None


def write_slots(
    key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor, positions: Tensor | None = None
) -> None:
    """Write the keys and values of new tokens into their slots.

    :param key: ``[num_tokens, num_kv_heads, head_dim]``; ``value`` likewise, not read if keys are the values
    :param cache: changed in place; if it is not quantized, keys and values are rounded to its dtype
    :param slot_mapping: ``[num_tokens]`` int64, no slot twice, none negative
    :param positions: ``[num_tokens]`` int64: position of each token in its sequence; needed if the cache has key
        offsets
    """
    if cache.key_offsets is not None:
        assert positions is not None, "key_offsets without positions"
        key = subtract_key_offsets(key, cache.key_offsets, positions)
    both = (key, cache.key, cache.k_scale), (value, cache.value, cache.v_scale)
    for new, pages, scales in both[:1] if cache.values_are_keys else both:
        slots = pages.flatten(0, 1)
        if scales is None:
            slots.index_copy_(0, slot_mapping, new.to(pages.dtype))
        else:
            codes, scale = quantize_q4(new) if cache.is_q4 else quantize_f8e4m3(new)
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
    """Implement :func:`reshape_and_cache` with torch operations."""
    kept = slot_mapping >= 0
    cache = LayerCache(key_cache, value_cache, k_scale, v_scale)
    write_slots(key[kept], value[kept], cache, slot_mapping[kept])


def gather_slots(cache: Tensor, slots: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Read the keys, or the values, of the given slots.

    :param slots: ``[...]`` int64
    :param scales: of a quantized cache, else None
    :param dtype: the dtype to decode a quantized cache to
    :returns: ``[..., num_kv_heads, head_dim]``, contiguous
    """
    index = slots.flatten()
    if scales is None:
        vectors = cache.flatten(0, 1).index_select(0, index)
    else:
        codes = cache.view(torch.uint8).flatten(0, 1).index_select(0, index).view(cache.dtype)
        decode = dequantize_q4 if cache.dtype == torch.uint8 else dequantize_f8e4m3
        vectors = decode(codes, scales.flatten(0, 1).index_select(0, index), dtype)
    return vectors.view(*slots.shape, *vectors.shape[1:])


def gather_decoded(cache: LayerCache, slots: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Read and decode keys and values of a quantized cache. No argument is checked, and nothing waits for the device.

    :param slots: ``[num_keys]`` int64
    :param positions: ``[num_keys]`` int64: position of each slot's token in its sequence, used for key offsets
    :returns: keys and values, each ``[num_keys, num_kv_heads, head_dim]`` of ``dtype``, contiguous; the same tensor if
        keys are the values
    """
    if why_not_triton(cache.key) is None and cache.key.shape[3] % 2 == 0 and not cache.is_q4:
        from paged_sdk.kernels.triton import decoded_pages

        return decoded_pages.gather_decoded(cache, slots, positions, dtype)
    key = gather_slots(cache.key, slots, cache.k_scale, torch.float32)
    if cache.key_offsets is not None:
        key = add_key_offsets(key, cache.key_offsets, positions)
    key = key.to(dtype)
    return key, key if cache.values_are_keys else gather_slots(cache.value, slots, cache.v_scale, dtype)


def copy_block(caches: Iterable[Tensor], source: int, target: int) -> None:
    """Copy one whole block within each of the given caches and scales."""
    for cache in caches:
        cache[target].copy_(cache[source])


def copy_blocks_reference(
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    block_pairs: Tensor,
    k_scales: Sequence[Tensor] = (),
    v_scales: Sequence[Tensor] = (),
) -> None:
    """Implement :func:`copy_blocks` with torch operations; pairs must be on the caches' device."""
    sources, targets = block_pairs.unbind(1)
    for cache in (*key_caches, *value_caches, *k_scales, *v_scales):
        # Viewed as bytes: not every device can index f8e4m3.
        blocks = cache.view(torch.uint8)
        blocks.index_copy_(0, targets, blocks.index_select(0, sources))

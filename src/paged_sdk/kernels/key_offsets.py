"""Subtracts key offsets from keys before they are stored in FP8: one vector per 128 neighbouring positions.

Some models add a bias to their keys; Qwen2.5's is up to a hundred times as large as the differences between tokens.
f8e4m3 has four significant bits, so the bias drowns these differences: mean KL against float32 was 0.73 on
Qwen2.5-Coder-1.5B. The rotary embedding rotates the bias with the position, but its large elements are in the slowest
pairs, which rotate by 1e-4 radians in 32 tokens. So the mean of the rotated bias over 128 positions is subtracted from
the keys at these positions before storing, and attention adds it back: mean KL is 0.0024. For fast pairs that mean is
nearly 0, and their bias stays in the key.

The vectors depend only on the model's weights and the position, not on data or chunking. Attention is exact for any
offsets, up to f8e4m3's rounding.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.checks import check_tensor

__all__ = ["KEY_SPAN", "add_key_offsets", "check_key_offsets", "subtract_key_offsets"]

KEY_SPAN: Final = 128
"""Number of neighbouring positions that share a vector: a multiple of every kernel's key tile."""


def subtract_key_offsets(key: Tensor, key_offsets: Tensor, positions: Tensor) -> Tensor:
    """Return keys minus their offsets, as the cache stores them.

    :param key: ``[num_tokens, num_kv_heads, head_dim]``
    :param key_offsets: ``[num_spans, num_kv_heads, head_dim]`` float32
    :param positions: ``[num_tokens]`` int64, of each token within its sequence
    :returns: like ``key``, in float32, or in the dtype of ``key`` if wider
    """
    return key - key_offsets.index_select(0, positions // KEY_SPAN)


def add_key_offsets(stored: Tensor, key_offsets: Tensor, positions: Tensor) -> Tensor:
    """Return keys with their offsets added back: the inverse of :func:`subtract_key_offsets`.

    :param stored: ``[..., num_kv_heads, head_dim]``, decoded
    :param positions: ``[...]`` int64
    """
    offsets = key_offsets.index_select(0, positions.flatten() // KEY_SPAN)
    return stored + offsets.view(*positions.shape, *offsets.shape[1:])


def check_key_offsets(key_offsets: Tensor | None, key_cache: Tensor, num_positions: int) -> None:
    """Check that key offsets fit a cache of keys.

    :param num_positions: number of positions that the offsets must cover
    :raises ConfigError: shape, dtype, strides or device do not fit, or the cache is not quantized
    """
    if key_offsets is None:
        return
    elements_per_byte = 2 if key_cache.dtype == torch.uint8 else 1
    shape = ("num_spans", key_cache.shape[2], elements_per_byte * key_cache.shape[3])
    check_tensor("key_offsets", key_offsets, shape, (torch.float32,), key_cache.device)
    if not key_offsets.is_contiguous():
        raise ConfigError.of("key_offsets.stride()", key_offsets.stride(), "a contiguous tensor")
    if key_cache.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise ConfigError.of("key_offsets", "given", f"None for a cache of {key_cache.dtype}: they are for codes")
    if len(key_offsets) * KEY_SPAN < num_positions:
        spans = -(-num_positions // KEY_SPAN)
        raise ConfigError.of("key_offsets.shape", tuple(key_offsets.shape), f"{spans} vectors for {num_positions} keys")

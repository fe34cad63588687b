"""Subtracts key offsets from keys before FP8 stores them: one vector for each 128 neighbouring positions.

Some models add a bias to their keys, and Qwen2.5's is up to a hundred times as large as what differs from token to
token. f8e4m3 keeps four significant bits of a number, so the bias drowns the rest: mean KL against float32 was 0.73 on
Qwen2.5-Coder-1.5B. Rotary embedding turns the bias with the position, but its large elements lie in the pairs that turn
least, 1e-4 radians in 32 tokens. So a key is stored less the mean of the turned bias over the 128 positions that its
own is one of, and attention adds that mean again: mean KL is 0.0024. Pairs that turn fast have a mean of almost
nothing, and stay in the key.

The vectors follow from the model's weights and the position alone: neither data nor how a prompt was cut into chunks
has a part in them. Whatever they are, attention is that of the keys that were given, but for f8e4m3's rounding.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.checks import check_tensor

__all__ = ["KEY_SPAN", "add_key_offsets", "check_key_offsets", "subtract_key_offsets"]

KEY_SPAN: Final = 128
"""So many neighbouring positions share a vector; they are whole tiles of keys in every kernel."""


def subtract_key_offsets(key: Tensor, key_offsets: Tensor, positions: Tensor) -> Tensor:
    """Return keys less their offsets, as the cache stores them.

    :param key: ``[num_tokens, num_kv_heads, head_dim]``
    :param key_offsets: ``[num_spans, num_kv_heads, head_dim]`` float32
    :param positions: ``[num_tokens]`` int64, of each token within its sequence
    :returns: like ``key``, of float32 or the wider dtype of ``key``
    """
    return key - key_offsets.index_select(0, positions // KEY_SPAN)


def add_key_offsets(stored: Tensor, key_offsets: Tensor, positions: Tensor) -> Tensor:
    """Return keys with their offsets added again, which undoes :func:`subtract_key_offsets`.

    :param stored: ``[..., num_kv_heads, head_dim]``, decoded
    :param positions: ``[...]`` int64
    """
    offsets = key_offsets.index_select(0, positions.flatten() // KEY_SPAN)
    return stored + offsets.view(*positions.shape, *offsets.shape[1:])


def check_key_offsets(key_offsets: Tensor | None, key_cache: Tensor, num_positions: int) -> None:
    """Check that key offsets fit a cache of keys.

    :param num_positions: positions that the offsets must reach
    :raises ConfigError: shape, dtype, strides or device do not fit, or the cache is not f8e4m3
    """
    if key_offsets is None:
        return
    shape = ("num_spans", *key_cache.shape[2:])
    check_tensor("key_offsets", key_offsets, shape, (torch.float32,), key_cache.device)
    if not key_offsets.is_contiguous():
        raise ConfigError.of("key_offsets.stride()", key_offsets.stride(), "a contiguous tensor")
    if key_cache.dtype != torch.float8_e4m3fn:
        raise ConfigError.of("key_offsets", "given", f"None for a cache of {key_cache.dtype}: it is for f8e4m3")
    if len(key_offsets) * KEY_SPAN < num_positions:
        spans = -(-num_positions // KEY_SPAN)
        raise ConfigError.of("key_offsets.shape", tuple(key_offsets.shape), f"{spans} vectors for {num_positions} keys")

"""Applies rotary position embeddings (Su et al., 2021, arXiv 2104.09864), with the KV cache write in the same call."""

from __future__ import annotations

from functools import cached_property

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.checks import FLOATS, check_key_cache, check_slots, check_tensor
from paged_sdk.kernels.fallback import device_of, runs_on_triton
from paged_sdk.kernels.key_offsets import check_key_offsets
from paged_sdk.kernels.kv_cache import write_slots

__all__ = ["Rotation", "rotate_and_cache", "rotate_and_cache_reference", "side_by_side_to_halves"]


@frozen
class Rotation:
    """Holds the rotary embedding at a step's positions, for n frequencies; made once per step for all layers.

    :ivar cosines: ``[num_tokens, n]`` float32, contiguous
    :ivar sines: likewise. A pair ``(a, b)`` becomes ``(a cos - b sin, b cos + a sin)``
    :ivar query_scale: ``[num_tokens]`` float32: what layers multiply queries by before steps rotate them, whose kernels
        do not read it; None: 1
    """

    cosines: Tensor
    sines: Tensor
    query_scale: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return cosines, sines, and the factors of queries if there are any; each has a row per token."""
        return (self.cosines, self.sines, *(() if self.query_scale is None else (self.query_scale,)))

    @cached_property
    def cos(self) -> Tensor:
        """Return the cosines as ``[num_tokens, 1, 1, n]``."""
        return self.cosines[:, None, None]

    @cached_property
    def sin(self) -> Tensor:
        """Return minus the sines, then the sines, as ``[num_tokens, 1, 2, n]``."""
        return torch.stack((-self.sines, self.sines), dim=1)[:, None]

    def rotate_(self, heads: Tensor) -> None:
        """Rotate the first 2n elements of each head, in place; element i is paired with element n + i.

        :param heads: ``[num_tokens, num_heads, head_dim]``, may be a view
        """
        n = self.cos.shape[-1]
        halves = torch.unflatten(heads[..., : 2 * n], -1, (2, n))
        rotated = halves * self.cos
        rotated.addcmul_(halves.flip(-2), self.sin)
        halves.copy_(rotated)


def side_by_side_to_halves(heads: Tensor, rotary_dim: int) -> Tensor:
    """Reorder the rotated elements of each head from interleaved pairs to two halves, the layout of all kernels. Scores
    do not change, since queries and keys are reordered alike.

    :param heads: ``[..., head_dim]``
    :param rotary_dim: leading elements that are rotated
    :returns: a new tensor: elements 0, 2, 4 ..., then 1, 3, 5 ..., then those that are not rotated
    """
    pairs = torch.unflatten(heads[..., :rotary_dim], -1, (rotary_dim // 2, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((pairs, heads[..., rotary_dim:]), -1)


def rotate_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosines: Tensor,
    sines: Tensor,
    cache: LayerCache,
    slot_mapping: Tensor,
    positions: Tensor | None = None,
) -> None:
    """Rotate queries and keys in place, and write keys and values into their slots.

    The first 2n elements of each head are rotated, element i with element n + i (see :meth:`Rotation.rotate_`), in
    float32 and rounded once.

    :param query: ``[num_tokens, num_heads, head_dim]`` float32, float16 or bfloat16, changed in place; may be a view
        with adjacent elements of heads, as may ``key`` and ``value``
    :param key: ``[num_tokens, num_kv_heads, head_dim]``, changed in place
    :param value: like ``key``
    :param cosines: ``[num_tokens, n]`` float32, contiguous, at the tokens' positions; ``sines`` likewise
    :param cache: changed in place. Key offsets are subtracted from stored keys only, not from ``key``
    :param slot_mapping: as in :func:`paged_sdk.kernels.kv_cache.reshape_and_cache`
    :param positions: ``[num_tokens]`` int64: position of each token in its sequence, if and only if the cache has key
        offsets; may be negative for tokens that are not written
    :raises ConfigError: shapes, dtypes, strides or devices do not fit; for tensors in CPU memory, also slots past the
        cache's end and positions past the key offsets
    """
    check_tensor("query", query, ("num_tokens", "num_heads", "head_dim"), FLOATS, query.device)
    num_tokens, _, head_dim = query.shape
    check_tensor("key", key, (num_tokens, "num_kv_heads", head_dim), (query.dtype,), query.device)
    check_tensor("value", value, tuple(key.shape), (query.dtype,), query.device)
    check_tensor("cosines", cosines, (num_tokens, "n"), (torch.float32,), query.device)
    check_tensor("sines", sines, tuple(cosines.shape), (torch.float32,), query.device)
    if 2 * cosines.shape[1] > head_dim:
        raise ConfigError.of("cosines.shape", tuple(cosines.shape), f"at most head_dim / 2 = {head_dim // 2} columns")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.stride(-1) != 1:
            raise ConfigError.of(f"{name}.stride()", tensor.stride(), "adjacent elements of a head")
    for name, tensor in (("cosines", cosines), ("sines", sines)):
        if not tensor.is_contiguous():
            raise ConfigError.of(f"{name}.stride()", tensor.stride(), "a contiguous tensor")
    check_key_cache(cache.key, key)
    if cache.num_kv_heads != key.shape[1]:
        raise ConfigError.of("key.shape", tuple(key.shape), f"num_kv_heads = {cache.num_kv_heads}, as in the cache")
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), (torch.int64,), key.device)
    if (cache.key_offsets is None) != (positions is None):
        missing = "key_offsets" if cache.key_offsets is None else "positions"
        raise ConfigError.of(missing, None, "both key_offsets and positions, or neither")
    if positions is not None:
        check_tensor("positions", positions, (num_tokens,), (torch.int64,), key.device)
    num_positions = 0
    if key.device.type == "cpu":
        check_slots(slot_mapping, len(cache.key) * cache.block_size)
        num_positions = 0 if positions is None else int(positions.numpy().max(initial=-1)) + 1
    check_key_offsets(cache.key_offsets, cache.key, num_positions)
    if runs_on_triton("rotate_and_cache", query):
        from paged_sdk.kernels.triton import rotary as triton_kernels

        with device_of(query):
            triton_kernels.rotate_and_cache(query, key, value, cosines, sines, cache, slot_mapping, positions)
    else:
        rotate_and_cache_reference(query, key, value, cosines, sines, cache, slot_mapping, positions)


def rotate_and_cache_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosines: Tensor,
    sines: Tensor,
    cache: LayerCache,
    slot_mapping: Tensor,
    positions: Tensor | None = None,
) -> None:
    """Implement :func:`rotate_and_cache` with torch operations."""
    n = cosines.shape[1]
    cos, sin = cosines[:, None], sines[:, None]
    for heads in (query, key):
        first, second = heads[..., :n], heads[..., n : 2 * n]
        rotated = first * cos - second * sin, second * cos + first * sin
        first.copy_(rotated[0])
        second.copy_(rotated[1])
    kept = slot_mapping >= 0
    positions = None if positions is None else positions[kept]
    write_slots(key[kept], value[kept], cache, slot_mapping[kept], positions)

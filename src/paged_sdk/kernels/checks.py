"""Checks the arguments of ops.

Shapes, dtypes and devices are always checked, contents only of tensors in CPU memory, so no check waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.q4 import GROUP

__all__ = [
    "FLOATS",
    "check_block_pairs",
    "check_cache",
    "check_head_vector",
    "check_heads",
    "check_key_cache",
    "check_pages",
    "check_rows",
    "check_score_options",
    "check_slots",
    "check_tensor",
    "scales_of",
]

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Dtypes of queries, keys and values; float64 is served by torch operations only."""


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check the shape, dtype and device of a tensor.

    :param shape: a number is the required size of a dimension; a word names a dimension of any size
    :raises ConfigError: the shape, dtype or device differs
    """
    sizes = tensor.shape
    if len(sizes) != len(shape) or any(
        isinstance(due, int) and size != due for size, due in zip(sizes, shape, strict=True)
    ):
        raise ConfigError.of(f"{name}.shape", tuple(sizes), f"[{', '.join(map(str, shape))}]")
    if tensor.dtype not in dtypes:
        raise ConfigError.of(f"{name}.dtype", tensor.dtype, " or ".join(map(str, dtypes)))
    if tensor.device != device:
        raise ConfigError.of(f"{name}.device", str(tensor.device), f"{device}, where the other tensors are")


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Check that the number of query heads is a multiple of the number of KV heads.

    :raises ConfigError: it is not
    """
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ConfigError.of("num_heads", num_heads, f"a multiple of num_kv_heads = {num_kv_heads}, both at least 1")


def check_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    like: Tensor,
) -> None:
    """Check pages of keys and values for tokens of the shape and dtype of ``like``, ``[num_tokens, heads, head_dim]``.

    :raises ConfigError: shapes, dtypes, strides or devices do not fit
    """
    check_key_cache(key_cache, like)
    check_pages(key_cache, value_cache, k_scale, v_scale)


def check_key_cache(key_cache: Tensor, like: Tensor) -> None:
    """Check pages of keys for tokens of the shape and dtype of ``like``, ``[num_tokens, heads, head_dim]``.

    :raises ConfigError: head size, dtype or device do not fit
    """
    layout = ("num_blocks", "block_size", "num_kv_heads", like.shape[-1])
    check_tensor("key_cache", key_cache, layout, (like.dtype, torch.float8_e4m3fn), like.device)


def check_pages(key_cache: Tensor, value_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Check that pages of keys, pages of values and their scales fit each other.

    :raises ConfigError: shapes, dtypes, strides or devices do not fit each other
    """
    device = key_cache.device
    layout = ("num_blocks", "block_size", "num_kv_heads", "head_dim")
    check_tensor("key_cache", key_cache, layout, (*FLOATS, torch.float8_e4m3fn, torch.uint8), device)
    check_tensor("value_cache", value_cache, tuple(key_cache.shape), (key_cache.dtype,), device)
    quantized = key_cache.dtype in (torch.float8_e4m3fn, torch.uint8)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is not None) != quantized:
            given = "None" if scale is None else f"a tensor of shape {tuple(scale.shape)}"
            raise ConfigError.of(
                name, given, f"scales with a float8_e4m3fn or uint8 cache only; the cache is {key_cache.dtype}"
            )
        if scale is not None:
            check_tensor(name, scale, *scales_of(key_cache.shape, key_cache.dtype), device)
    for name, tensor in (
        ("key_cache", key_cache),
        ("value_cache", value_cache),
        ("k_scale", k_scale),
        ("v_scale", v_scale),
    ):
        if tensor is not None and not tensor.is_contiguous():
            raise ConfigError.of(f"{name}.stride()", tensor.stride(), "a contiguous tensor")


def scales_of(shape: Sequence[int], dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[torch.dtype]]:
    """Return the shape and dtype of the scales of a quantized cache, given its own: f8e4m3, or uint8 for 4-bit codes.

    :raises ConfigError: the heads of 4-bit codes are not of whole groups
    """
    if dtype == torch.float8_e4m3fn:
        return tuple(shape[:3]), (torch.float32,)
    groups, rest = divmod(2 * shape[3], GROUP)
    if rest:
        raise ConfigError.of("key_cache.shape", tuple(shape), f"heads of a multiple of {GROUP} elements, two per byte")
    return (*shape[:3], groups, 2), (torch.bfloat16,)


def check_head_vector(name: str, vector: Tensor | None, num_heads: int, device: torch.device) -> None:
    """Check that a vector, if given, has one float32 number per query head.

    :raises ConfigError: the shape, dtype or device differs
    """
    if vector is not None:
        check_tensor(name, vector, (num_heads,), (torch.float32,), device)


def check_score_options(scale: float, window: int | None, softcap: float | None) -> None:
    """Check scale, window and softcap.

    :raises ConfigError: one of them is out of range
    """
    if not math.isfinite(scale):
        raise ConfigError.of("scale", scale, "a finite number")
    if window is not None and window < 1:
        raise ConfigError.of("window", window, "an int >= 1, or None: no window")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ConfigError.of("softcap", softcap, "a finite number above 0, or None: no cap")


def check_rows(
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_tokens: int,
    num_blocks: int,
    block_size: int,
    window: int | None,
    max_seqlen_q: int,
    max_context_len: int,
) -> None:
    """Check a batch in CPU memory: wrong numbers would make a kernel read out of bounds.

    :raises ConfigError: lengths or blocks are out of range
    """
    tables, lengths, ends = block_tables.numpy(), context_lens.numpy(), cu_seqlens_q.numpy()
    counts = np.diff(ends)
    if ends[0] != 0 or ends[-1] != num_tokens or (counts < 0).any():
        raise ConfigError.of(
            "cu_seqlens_q", ends.tolist(), f"ascending numbers from 0 to the number of query tokens, {num_tokens}"
        )
    if counts.max(initial=0) > max_seqlen_q:
        raise ConfigError.of("max_seqlen_q", max_seqlen_q, f"at least the longest row, {counts.max()} query tokens")
    capacity = tables.shape[1] * block_size
    if lengths.min(initial=0) < 0 or lengths.max(initial=0) > capacity:
        raise ConfigError.of(
            "context_lens",
            lengths.tolist(),
            f"0 to {capacity}, what {tables.shape[1]} blocks of {block_size} tokens hold",
        )
    if lengths.max(initial=0) > max_context_len:
        raise ConfigError.of("max_context_len", max_context_len, f"at least the longest context, {lengths.max()}")
    first_seen = np.zeros_like(lengths) if window is None else np.maximum(lengths - counts - window + 1, 0)
    column = np.arange(tables.shape[1])
    seen = (column >= (first_seen // block_size)[:, None]) & (column * block_size < lengths[:, None])
    blocks = tables[seen]
    if ((blocks < 0) | (blocks >= num_blocks)).any():
        wrong = blocks[(blocks < 0) | (blocks >= num_blocks)]
        raise ConfigError.of("block_tables", int(wrong[0]), f"blocks 0 to {num_blocks - 1} within each context length")


def check_slots(slot_mapping: Tensor, num_slots: int) -> None:
    """Check slots in CPU memory.

    :raises ConfigError: one of them is past the end of the cache
    """
    largest = slot_mapping.numpy().max(initial=-1)
    if largest >= num_slots:
        raise ConfigError.of("slot_mapping", int(largest), f"slots below {num_slots}, negative ones for padding")


def check_block_pairs(block_pairs: Tensor, num_blocks: int) -> None:
    """Check pairs of blocks in CPU memory.

    :raises ConfigError: a block does not exist, or the result would depend on the order of the pairs
    """
    pairs = block_pairs.numpy()
    if pairs.min(initial=0) < 0 or pairs.max(initial=0) >= num_blocks:
        raise ConfigError.of("block_pairs", pairs.tolist(), f"blocks 0 to {num_blocks - 1}")
    sources, targets = set(pairs[:, 0].tolist()), pairs[:, 1].tolist()
    if len(set(targets)) < len(targets) or not sources.isdisjoint(targets):
        raise ConfigError.of("block_pairs", pairs.tolist(), "each target once, and none of them a source as well")

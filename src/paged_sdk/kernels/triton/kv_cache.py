"""Writes and copies pages of a KV cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_sdk.kernels.fp8 import ERROR_STEPS, PEAK_CODES

__all__ = [
    "as_bytes",
    "cache_heads",
    "copy_blocks",
    "num_warps",
    "reshape_and_cache",
    "scale_of_heads",
    "store_head_parts",
]

_ELEMENTS: Final = 1024  # elements per program
_COPIED_BYTES: Final = 8192  # bytes copied per program

_FIRST_PEAK: tl.constexpr = tl.constexpr(PEAK_CODES.start)
_PAST_PEAKS: tl.constexpr = tl.constexpr(PEAK_CODES.stop)
_PEAK_STEP: tl.constexpr = tl.constexpr(PEAK_CODES.step)
_ERROR_STEPS: tl.constexpr = tl.constexpr(ERROR_STEPS)
_SMALLEST_SCALE: tl.constexpr = tl.constexpr(1.1754943508222875e-38)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See :func:`paged_sdk.kernels.kv_cache.reshape_and_cache`."""
    num_tokens, num_heads, head_dim = key.shape
    if key.numel() == 0:
        return
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    num_kinds = 1 if value_cache is key_cache else 2
    block = triton.next_power_of_2(head_dim)
    block_h = min(max(_ELEMENTS // block, 1), triton.next_power_of_2(num_heads))
    _reshape_and_cache_kernel[(num_tokens, triton.cdiv(num_heads, block_h), num_kinds)](
        key,
        value,
        as_bytes(key_cache),
        as_bytes(value_cache),
        slot_mapping,
        k_scale,
        v_scale,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        num_heads,
        head_dim=head_dim,
        block_h=block_h,
        block=block,
        num_warps=num_warps(k_scale),
    )


def copy_blocks(caches: Sequence[Tensor], block_pairs: Tensor) -> None:
    """See :func:`paged_sdk.kernels.kv_cache.copy_blocks`; pairs must be on the caches' device.

    One launch copies all caches of one size, those of all layers in most models, and one all such scales.

    :param caches: of keys, values and scales, each once
    """
    alike: dict[int, list[Tensor]] = {}
    for each in caches if len(block_pairs) else ():
        alike.setdefault(each.nbytes, []).append(each)
    for each_size in alike.values():
        _copy_alike(each_size, block_pairs)


def _copy_alike(caches: Sequence[Tensor], block_pairs: Tensor) -> None:
    block_bytes = caches[0].nbytes // len(caches[0])
    addresses = tuple(cache.data_ptr() for cache in caches)
    vector = next(size for size in (16, 4, 1) if all(number % size == 0 for number in (block_bytes, *addresses)))
    word = min(vector, 4)
    block = triton.next_power_of_2(min(block_bytes, _COPIED_BYTES) // word)
    _copy_blocks_kernel[(len(block_pairs), triton.cdiv(block_bytes // word, block), len(caches))](
        _address_table(addresses, block_pairs.device),
        block_pairs.contiguous(),
        block_bytes // vector,
        word=word,
        vector=vector,
        block=block,
        num_warps=2,
    )


@functools.lru_cache(maxsize=8)
def _address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Make a table of the caches' addresses, cached so that later calls, or CUDA graphs, need no copy of it."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def num_warps(scale: Tensor | None) -> int:
    """Return the number of warps of a program that writes 1024 elements.

    Choosing the scales of an f8e4m3 cache takes 1,900 instructions per thread with two warps, 800 with eight (compiled
    for sm_90).
    """
    return 2 if scale is None else 8


def as_bytes(cache: Tensor) -> Tensor:
    """View an f8e4m3 cache as bytes: kernels encode by integer operations, since Ampere has no conversion to FP8."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@triton.jit
def _encode_f8e4m3(x: tl.tensor) -> tl.tensor:
    """Return the f8e4m3 code nearest to each number of magnitude below 464, ties to even; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Round at bit 20, where a carry may raise the exponent; then change float32's exponent bias of 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 codes are multiples of 2**-9, which is the last bit of float32 numbers from 2**14 on.
    counted = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, counted, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _divide(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """Divide with IEEE rounding: Triton's default division is approximate."""
    return tl.math.div_rn(x, y)


@triton.jit
def _reciprocal(x: tl.tensor) -> tl.tensor:
    return _divide(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def _peak_of_heads(x: tl.tensor) -> tl.tensor:
    """Return the largest magnitude of each row as float32 bits; as integers, NaN compares largest and is not lost."""
    return tl.max(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _squared_error(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Compute the squared error of rounding each row to codes, in units of ``(scale / ERROR_STEPS) ** 2``."""
    # The abs after the product keeps compilers from fusing the product with the subtraction.
    ratio = tl.abs(x.to(tl.float32) * _reciprocal(scale)[:, None])
    nearest = ((ratio.to(tl.int32, bitcast=True) + 0x80000) & -0x100000).to(tl.float32, bitcast=True)
    steps = ((ratio - nearest) * _ERROR_STEPS + 12582912.0) - 12582912.0  # adding 1.5 * 2**23 rounds to nearest even
    return tl.sum((steps * steps).to(tl.int32), 1)


@triton.jit
def scale_of_heads(parts: tl.tuple) -> tl.tensor:
    """Choose the scale of each head; its elements are given in parts, ``[block_h, ...]`` each."""
    bits = _peak_of_heads(parts[0])
    for part in tl.static_range(1, len(parts)):
        bits = tl.maximum(bits, _peak_of_heads(parts[part]))
    peak = bits.to(tl.float32, bitcast=True)
    best = peak
    least = tl.full(peak.shape, float("inf"), tl.float32)
    for peak_code in tl.static_range(_FIRST_PEAK, _PAST_PEAKS, _PEAK_STEP):
        code = tl.full(peak.shape, peak_code, tl.float32)
        scale = _divide(peak, code)
        scale = tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)
        total = _squared_error(parts[0], scale)
        for part in tl.static_range(1, len(parts)):
            total += _squared_error(parts[part], scale)
        error = _divide(total.to(tl.float32), code * code)
        best = tl.where(error < least, scale, best)
        least = tl.minimum(error, least)
    return best


@triton.jit
def store_head_parts(
    pointers: tl.tensor, x: tl.tensor, scale: tl.tensor, mask: tl.tensor, quantized: tl.constexpr
) -> None:
    """Store elements of heads, either unquantized or as codes, divided by their head's scale."""
    if quantized:
        codes = x.to(tl.float32) * _reciprocal(scale)[:, None]
        tl.store(pointers, _encode_f8e4m3(codes), mask=mask)
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def cache_heads(
    x: tl.tensor,
    cache_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    num_heads: tl.tensor,
    mask: tl.tensor,
    head_dim: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write heads ``[block_h, block]`` of one token into its slot."""
    place = slot * num_heads + head
    pointers = cache_ptr + place[:, None] * head_dim + tl.arange(0, block)[None, :]
    if scale_ptr is not None:
        scale = scale_of_heads((x,))
        tl.store(scale_ptr + place, scale, mask=(head < num_heads) & (slot >= 0))
        store_head_parts(pointers, x, scale, mask, True)
    else:
        store_head_parts(pointers, x, x, mask, False)


@triton.jit
def _reshape_and_cache_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    num_heads: tl.tensor,
    head_dim: tl.constexpr,
    block_h: tl.constexpr,
    block: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_h + tl.arange(0, block_h)
    slot = tl.load(slot_ptr + token)
    column = tl.arange(0, block)[None, :]
    mask = (head < num_heads)[:, None] & (column < head_dim) & (slot >= 0)
    if tl.program_id(2) == 0:
        key = tl.load(key_ptr + token * key_stride + head[:, None] * key_head_stride + column, mask=mask, other=0.0)
        cache_heads(key, key_cache_ptr, k_scale_ptr, slot, head, num_heads, mask, head_dim, block)
    else:
        value_place = token * value_stride + head[:, None] * value_head_stride + column
        value = tl.load(value_ptr + value_place, mask=mask, other=0.0)
        cache_heads(value, value_cache_ptr, v_scale_ptr, slot, head, num_heads, mask, head_dim, block)


@triton.jit
def _copy_blocks_kernel(
    addresses_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    num_vectors: tl.tensor,
    word: tl.constexpr,
    vector: tl.constexpr,
    block: tl.constexpr,
) -> None:
    source = tl.load(pairs_ptr + 2 * tl.program_id(0))
    target = tl.load(pairs_ptr + 2 * tl.program_id(0) + 1)
    address = tl.load(addresses_ptr + tl.program_id(2))
    cache = address.to(tl.pointer_type(tl.int32 if word == 4 else tl.int8))
    i = tl.program_id(1) * block + tl.arange(0, block)
    mask = i < num_vectors * (vector // word)
    source_place = tl.multiple_of(cache + source * num_vectors * (vector // word), vector)
    target_place = tl.multiple_of(cache + target * num_vectors * (vector // word), vector)
    tl.store(target_place + i, tl.load(source_place + i, mask=mask), mask=mask)

"""Choosing tokens: rows of logits are cut into tiles, so that one row alone keeps a device busy.

A draw takes four short launches: the largest logit of each tile and of the row, the weight of each tile, and the search
for the token within the tile where the uniform number falls. Nothing of the size of the vocabulary is written.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["argmax", "draw"]

_TILE: Final = 4096


def argmax(logits: Tensor) -> Tensor:
    """See :func:`paged_sdk.kernels.sampling.argmax`."""
    return _largest(logits)[0]


def draw(logits: Tensor, temperature: Tensor, min_p: Tensor, uniforms: Tensor) -> Tensor:
    """See :func:`paged_sdk.kernels.sampling.draw`."""
    tokens, largest = _largest(logits)
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, _TILE)
    sums = logits.new_empty(num_rows, num_tiles)
    if num_rows:
        settings = largest, temperature.contiguous(), min_p.contiguous()
        _tile_weight_kernel[(num_rows, num_tiles)](
            logits, *settings, sums, logits.stride(0), vocab_size, num_tiles, block=_TILE, num_warps=4
        )
        _draw_kernel[(num_rows,)](
            logits,
            *settings,
            sums,
            uniforms.contiguous(),
            tokens,
            logits.stride(0),
            vocab_size,
            num_tiles,
            block_tiles=triton.next_power_of_2(num_tiles),
            block=_TILE,
            num_warps=8,
        )
    return tokens


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row, or -1, and its logit."""
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, _TILE)
    values = logits.new_empty(num_rows, num_tiles)
    places = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    largest = logits.new_empty(num_rows)
    if num_rows:
        _tile_argmax_kernel[(num_rows, num_tiles)](
            logits, values, places, logits.stride(0), vocab_size, num_tiles, block=_TILE, num_warps=4
        )
        _join_argmax_kernel[(num_rows,)](
            values, places, tokens, largest, num_tiles, block_tiles=triton.next_power_of_2(num_tiles), num_warps=1
        )
    return tokens, largest


@triton.jit
def _tile_argmax_kernel(
    logits_ptr: tl.tensor,
    values_ptr: tl.tensor,
    places_ptr: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    block: tl.constexpr,
) -> None:
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * block + tl.arange(0, block)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab_size, other=float("-inf"))
    # NaN takes the place of +inf: either way nothing can be drawn.
    logits = tl.where(logits != logits, float("inf"), logits)
    value, place = tl.max(logits, 0, return_indices=True)
    tl.store(values_ptr + row * num_tiles + tile, value)
    tl.store(places_ptr + row * num_tiles + tile, tile * block + place)


@triton.jit
def _join_argmax_kernel(
    values_ptr: tl.tensor,
    places_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    num_tiles: tl.tensor,
    block_tiles: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, block_tiles)
    values = tl.load(values_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    value, first = tl.max(values, 0, return_indices=True)
    token = tl.load(places_ptr + row * num_tiles + first).to(tl.int64)
    finite = tl.abs(value) < float("inf")
    tl.store(tokens_ptr + row, tl.where(finite, token, -1))
    tl.store(largest_ptr + row, tl.where(finite, value, 0.0))


@triton.jit
def _weights(
    logits_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    row: tl.tensor,
    token: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
) -> tl.tensor:
    mask = token < vocab_size
    logits = tl.load(logits_ptr + row * stride + token, mask=mask, other=float("-inf"))
    weights = tl.exp((logits - tl.load(largest_ptr + row)) / tl.load(temperature_ptr + row))
    return tl.where(mask & (weights >= tl.load(min_p_ptr + row)), weights, 0.0)


@triton.jit
def _tile_weight_kernel(
    logits_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    block: tl.constexpr,
) -> None:
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * block + tl.arange(0, block)
    weights = _weights(logits_ptr, largest_ptr, temperature_ptr, min_p_ptr, row, token, stride, vocab_size)
    tl.store(sums_ptr + row * num_tiles + tile, tl.sum(weights, 0))


@triton.jit
def _draw_kernel(
    logits_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    uniforms_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    block_tiles: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Replaces the tokens of rows in which there is one to draw."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(tokens_ptr + row) >= 0:
        tile = tl.arange(0, block_tiles)
        sums = tl.load(sums_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=0.0).to(tl.float64)
        cumulative = tl.cumsum(sums, 0)
        target = tl.load(uniforms_ptr + row) * tl.sum(sums, 0)
        chosen = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), num_tiles - 1)
        start = tl.sum(tl.where(tile < chosen, sums, 0.0), 0)
        mass = tl.sum(tl.where(tile == chosen, sums, 0.0), 0)
        token = chosen * block + tl.arange(0, block)
        weights = _weights(logits_ptr, largest_ptr, temperature_ptr, min_p_ptr, row, token, stride, vocab_size)
        inner = tl.cumsum(weights.to(tl.float64), 0)
        # Relative to the tile, whose float32 sum differs from the float64 one in its last bits.
        total = tl.sum(weights.to(tl.float64), 0)
        within = tl.maximum((target - start) / mass, 0.0) * total
        drawn = tl.sum(((inner <= within) & (inner < total)).to(tl.int32), 0)
        tl.store(tokens_ptr + row, (chosen * block + drawn).to(tl.int64))

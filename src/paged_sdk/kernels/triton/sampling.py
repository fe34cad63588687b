"""Samples tokens in two launches: one over tiles of all rows, so that even one row fills a device, and one over rows.

For greedy sampling, the first finds the likeliest token of each tile. For a draw, it finds the largest logit and the
weight of every group of tokens, from which the second picks a group and then a token in it. For top-k, top-p and min-p,
the second also rereads groups with a logit above a threshold or above the picked one, which are few unless the
distribution is flat. Nothing of the size of the vocabulary is written.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_sdk.kernels.draw_settings import NEXT_TRY, DrawSettings
from paged_sdk.kernels.triton.truncation import just_above, kept_masses, min_p_threshold, top_k_threshold

__all__ = ["argmax", "draw", "uniform"]

_TILE: Final = 4096
_GROUP: Final = 128  # tokens

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_NEXT_TRY: tl.constexpr = tl.constexpr(NEXT_TRY)
_GAMMA: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST_FACTOR: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_FACTOR: tl.constexpr = tl.constexpr(0x94D049BB133111EB)


def argmax(logits: Tensor) -> Tensor:
    """See :func:`paged_sdk.kernels.sampling.argmax`."""
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, _TILE)
    values = logits.new_empty(num_rows, num_tiles)
    places = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _tile_argmax_kernel[(num_rows, num_tiles)](
            logits, values, places, logits.stride(0), vocab_size, num_tiles, block=_TILE, num_warps=4
        )
        _join_argmax_kernel[(num_rows,)](
            values, places, tokens, num_tiles, block_tiles=triton.next_power_of_2(num_tiles), num_warps=1
        )
    return tokens


def draw(logits: Tensor, settings: DrawSettings) -> Tensor:
    """See :func:`paged_sdk.kernels.sampling.draw`; settings must be contiguous."""
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, _TILE)
    num_groups = num_tiles * (_TILE // _GROUP)
    maxima, masses = logits.new_empty(2, num_rows, num_groups)
    live = torch.empty(num_rows, num_groups, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _group_kernel[(num_rows, num_tiles)](
            logits,
            settings.temperature,
            maxima,
            masses,
            logits.stride(0),
            vocab_size,
            num_groups,
            groups=_TILE // _GROUP,
            group=_GROUP,
            num_warps=4,
        )
        _draw_kernel[(num_rows,)](
            logits,
            settings.temperature,
            settings.top_k,
            settings.top_p,
            settings.min_p,
            settings.streams,
            settings.positions,
            maxima,
            masses,
            live,
            tokens,
            logits.stride(0),
            vocab_size,
            num_groups,
            block_groups=triton.next_power_of_2(num_groups),
            group=_GROUP,
            num_warps=8,
            maxnreg=128,  # for two programs per multiprocessor; unlimited, rows of 152,064 take 161, and one runs
        )
    return tokens


@triton.jit
def uniform(stream: tl.tensor, position: tl.tensor) -> tl.tensor:
    """See :func:`paged_sdk.kernels.sampling.uniforms`."""
    bits = stream.to(tl.uint64, bitcast=True) + _GAMMA * (position + 1).to(tl.uint64, bitcast=True)
    bits = (bits ^ (bits >> 30)) * _FIRST_FACTOR
    bits = (bits ^ (bits >> 27)) * _SECOND_FACTOR
    return ((bits ^ (bits >> 31)) >> 11).to(tl.float64) * 2.0**-53


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
    # NaN is treated as +inf: in both cases no token can be sampled.
    logits = tl.where(logits != logits, float("inf"), logits)
    value, place = tl.max(logits, 0, return_indices=True)
    tl.store(values_ptr + row * num_tiles + tile, value)
    tl.store(places_ptr + row * num_tiles + tile, tile * block + place)


@triton.jit
def _join_argmax_kernel(
    values_ptr: tl.tensor,
    places_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    num_tiles: tl.tensor,
    block_tiles: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, block_tiles)
    values = tl.load(values_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    value, first = tl.max(values, 0, return_indices=True)
    token = tl.load(places_ptr + row * num_tiles + first).to(tl.int64)
    tl.store(tokens_ptr + row, tl.where(tl.abs(value) < float("inf"), token, -1))


@triton.jit
def _group_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    num_groups: tl.tensor,
    groups: tl.constexpr,
    group: tl.constexpr,
) -> None:
    """Find the largest logit of each group, and the sum of its logits' weights relative to that."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * groups + tl.arange(0, groups)
    token = place[:, None] * group + tl.arange(0, group)[None, :]
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab_size, other=float("-inf"))
    logits = tl.where(logits != logits, float("inf"), logits)
    largest = tl.max(logits, 1)
    tl.store(maxima_ptr + row * num_groups + place, largest)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        finite = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)[:, None]
        weights = tl.exp2(tl.minimum(logits - finite, 0.0) * (_LOG2_E / temperature))
        tl.store(masses_ptr + row * num_groups + place, tl.sum(weights, 1))


@triton.jit
def _draw_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    streams_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    live_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    num_groups: tl.tensor,
    block_groups: tl.constexpr,
    group: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    live_ptr += row * num_groups
    masses_ptr += row * num_groups
    place = tl.arange(0, block_groups)
    exists = place < num_groups
    maxima = tl.load(maxima_ptr + row * num_groups + place, mask=exists, other=float("-inf"))
    largest = tl.max(maxima, 0)
    temperature = tl.load(temperature_ptr + row)
    if tl.abs(largest) == float("inf"):
        tl.store(tokens_ptr + row, -1)
    elif temperature == 0:
        tl.store(tokens_ptr + row, _find(logits_ptr, maxima, largest, vocab_size, group))
    else:
        rate = _LOG2_E / temperature
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        stream, position = tl.load(streams_ptr + row), tl.load(positions_ptr + row)
        masses = tl.load(masses_ptr + place, mask=exists, other=0.0) * tl.exp2((maxima - largest) * rate)
        threshold = tl.full((), float("-inf"), tl.float32)
        if top_k < vocab_size:
            threshold = top_k_threshold(logits_ptr, live_ptr, maxima, exists, top_k, vocab_size, group)
            masses = kept_masses(
                logits_ptr, live_ptr, masses_ptr, maxima, exists, largest, rate, threshold, vocab_size, group
            )
        enough = top_p * tl.sum(masses, 0)
        if min_p > 0:
            threshold = tl.maximum(threshold, min_p_threshold(largest, rate, min_p))
            masses = kept_masses(
                logits_ptr, live_ptr, masses_ptr, maxima, exists, largest, rate, threshold, vocab_size, group
            )
        token = tl.full((), -1, tl.int32)
        while token < 0:
            number = uniform(stream, position)
            token, logit = _pick(logits_ptr, masses, number, largest, rate, threshold, vocab_size, group)
            if top_p < 1:
                threshold = just_above(logit)
                masses = kept_masses(
                    logits_ptr, live_ptr, masses_ptr, maxima, exists, largest, rate, threshold, vocab_size, group
                )
                # The draw is rejected if larger logits alone have enough weight; for the largest logit, above is 0.
                above = tl.sum(masses, 0)
                token = tl.where((above > 0) & (above >= enough), -1, token)
                position += _NEXT_TRY
        tl.store(tokens_ptr + row, token)


@triton.jit
def _find(
    row_ptr: tl.tensor, maxima: tl.tensor, largest: tl.tensor, vocab_size: tl.tensor, group: tl.constexpr
) -> tl.tensor:
    """Return the first token with the largest logit."""
    place = tl.arange(0, maxima.shape[0])
    token = tl.min(tl.where(maxima == largest, place, maxima.shape[0]), 0) * group + tl.arange(0, group)
    logits = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
    return tl.min(tl.where(logits == largest, token, vocab_size), 0)


@triton.jit
def _pick(
    row_ptr: tl.tensor,
    masses: tl.tensor,
    number: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    threshold: tl.tensor,
    vocab_size: tl.tensor,
    group: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Pick a token by weight from those with logits of at least a threshold; return the token and its logit.

    :param masses: the sum of these tokens' weights in each group
    """
    place = tl.arange(0, masses.shape[0])
    cumulative = tl.cumsum(masses.to(tl.float64), 0)
    total = tl.max(cumulative, 0)
    target = number * total
    chosen = tl.sum(((cumulative <= target) & (cumulative < total)).to(tl.int32), 0)
    start = tl.max(tl.where(place < chosen, cumulative, 0.0), 0)
    mass = tl.sum(tl.where(place == chosen, masses, 0.0), 0)
    offset = tl.arange(0, group)
    token = chosen * group + offset
    logits = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
    weights = tl.where(logits >= threshold, tl.exp2((logits - largest) * rate), 0.0)
    inner = tl.cumsum(weights.to(tl.float64), 0)
    # The target is rescaled to this group's sum, which may differ from ``mass`` in the last bits.
    inner_total = tl.max(inner, 0)
    within = tl.maximum((target - start) / mass, 0.0) * inner_total
    drawn = tl.sum(((inner <= within) & (inner < inner_total)).to(tl.int32), 0)
    return chosen * group + drawn, tl.sum(tl.where(offset == drawn, logits, 0.0), 0)

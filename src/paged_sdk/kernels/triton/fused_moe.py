"""Computes a mixture of experts: with two kernels for few tokens, with grouped matrix products for many.

A pair is a token and one of its experts; pair ``p`` is of token ``p // num_selected``. Few pairs rarely share an
expert, so each pair is multiplied by its expert's matrices as a vector. Many pairs are sorted by expert on the device
and divided into tiles of one expert each, so that an expert's matrices are read once for all its tokens. Only the
device knows the number of tiles: the grid is an upper bound, and programs beyond the last tile exit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.triton.activation import activate
from paged_sdk.kernels.triton.expert_tiles import sort_by_expert

__all__ = ["fused_moe"]


def fused_moe(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: KernelActivation = "silu",
) -> Tensor:
    """See :func:`paged_sdk.kernels.fused_moe.fused_moe`; float32, float16 or bfloat16, weights contiguous."""
    num_experts, (num_tokens, num_selected) = len(gate_up), topk_ids.shape
    hidden, topk_weights, topk_ids = hidden.contiguous(), topk_weights.contiguous(), topk_ids.contiguous()
    if num_tokens == 0:
        return torch.empty_like(hidden)
    # With so few pairs, an expert rarely has two, and its matrices are then read from the L2 cache the second time.
    if num_tokens == 1 or num_tokens * num_selected <= num_experts // 2:
        return _few_pairs(hidden, gate_up, down, topk_weights, topk_ids, activation)
    return _many_pairs(hidden, gate_up, down, topk_weights, topk_ids, activation)


def _few_pairs(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: KernelActivation,
) -> Tensor:
    _, hidden_size, intermediate_size = down.shape
    is_gated = gate_up.shape[1] != intermediate_size
    num_tokens, num_selected = topk_ids.shape
    num_pairs = num_tokens * num_selected
    activated = hidden.new_empty(num_pairs, intermediate_size)
    # Each program has about 16 KiB of loads in flight, and one token has some hundred programs.
    block_n = 8
    _gate_up_of_pairs[num_pairs, triton.cdiv(intermediate_size, block_n)](
        hidden,
        gate_up,
        topk_ids,
        activated,
        num_selected=num_selected,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        activation=activation,
        is_gated=is_gated,
        block_n=block_n,
        block_k=min(512, triton.next_power_of_2(hidden_size)),
        num_warps=4,
    )
    out = torch.empty_like(hidden)
    padded_selected = triton.next_power_of_2(num_selected)
    block_n = max(1, 32 // padded_selected)
    _down_of_tokens[num_tokens, triton.cdiv(hidden_size, block_n)](
        activated,
        down,
        topk_weights,
        topk_ids,
        out,
        num_selected=num_selected,
        padded_selected=padded_selected,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        block_n=block_n,
        block_k=min(256, triton.next_power_of_2(intermediate_size)),
        num_warps=4,
    )
    return out


def _many_pairs(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: KernelActivation,
) -> Tensor:
    num_experts, hidden_size, intermediate_size = down.shape
    is_gated = gate_up.shape[1] != intermediate_size
    num_tokens, num_selected = topk_ids.shape
    num_pairs = num_tokens * num_selected
    tile = _choose_tile(num_pairs / num_experts, hidden.dtype)
    pairs, tiles = sort_by_expert(topk_ids, num_experts, tile.block_m)
    num_tiles = tiles.shape[1]
    activated = hidden.new_empty(num_pairs, intermediate_size)
    block_n = tile.block_n // 2 if is_gated else tile.block_n  # rows of gate, and the same number of up
    _gate_up_of_tiles[(num_tiles * triton.cdiv(intermediate_size, block_n),)](
        hidden,
        gate_up,
        pairs,
        tiles,
        activated,
        num_tiles,
        num_experts=num_experts,
        num_selected=num_selected,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        activation=activation,
        is_gated=is_gated,
        block_m=tile.block_m,
        block_n=block_n,
        block_k=tile.block_k,
        upcast=not hidden.is_cuda,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    # In float32: the outputs of a token's experts may nearly cancel, which would leave the rounding errors of 16 bits.
    weighted = hidden.new_empty(num_tokens, num_selected, hidden_size, dtype=torch.float32)
    _down_of_tiles[(num_tiles * triton.cdiv(hidden_size, tile.block_n),)](
        activated,
        down,
        topk_weights,
        pairs,
        tiles,
        weighted,
        num_tiles,
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        block_m=tile.block_m,
        block_n=tile.block_n,
        block_k=tile.block_k,
        upcast=not hidden.is_cuda,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return weighted.sum(1).to(hidden.dtype)


@frozen
class _Tile:
    """Describes the tile sizes of a grouped product.

    :ivar block_m: pairs of one expert
    :ivar block_n: rows of the expert's matrix
    :ivar block_k: elements of a row that are read at once
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def _choose_tile(rows_per_expert: float, dtype: torch.dtype) -> _Tile:
    """Choose tiles for 1.5 times an expert's average number of rows, since a second tile would read weights again."""
    block_m = min(max(triton.next_power_of_2(int(rows_per_expert * 1.5)), 16), 128)
    if dtype is torch.float32:  # without tensor cores
        return _Tile(min(block_m, 64), 64, 32, num_warps=4, num_stages=3)
    match block_m:
        case 16:
            return _Tile(block_m, 64, 128, num_warps=4, num_stages=4)
        case 32 | 64:
            return _Tile(block_m, 128, 64, num_warps=4, num_stages=4)
        case _:
            return _Tile(block_m, 256, 64, num_warps=8, num_stages=3)


@triton.jit(do_not_specialize=["num_tiles"])
def _gate_up_of_tiles(
    hidden: tl.tensor,
    gate_up: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    activated: tl.tensor,
    num_tiles: tl.tensor,
    num_experts: tl.constexpr,
    num_selected: tl.constexpr,
    hidden_size: tl.constexpr,
    intermediate_size: tl.constexpr,
    activation: tl.constexpr,
    is_gated: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    upcast: tl.constexpr,
) -> None:
    """Compute ``activation(gate @ x) * (up @ x)`` for the pairs of a tile, in sorted order; without gates,
    ``activation(up @ x)``.
    """
    rows_per_expert: tl.constexpr = 2 * intermediate_size if is_gated else intermediate_size
    blocks_per_tile: tl.constexpr = (intermediate_size + block_n - 1) // block_n
    tile = tl.program_id(0) // blocks_per_tile
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert >= num_experts:
        return
    row = tl.load(tiles + num_tiles + tile) + tl.arange(0, block_m)
    valid = row < tl.load(tiles + 2 * num_tiles + tile)
    token = tl.load(pairs + row, mask=valid, other=0) // num_selected
    column = (tl.program_id(0) % blocks_per_tile) * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    x_at = hidden + token.to(tl.int64)[:, None] * hidden_size + k[None, :]
    gate_at = gate_up + expert * (rows_per_expert * hidden_size) + column[None, :] * hidden_size + k[:, None]
    up_at = gate_at + intermediate_size * hidden_size
    gate = tl.zeros([block_m, block_n], tl.float32)
    up = tl.zeros([block_m, block_n], tl.float32)
    for first in range(0, hidden_size, block_k):
        x_mask = valid[:, None]
        w_mask = (column < intermediate_size)[None, :]
        if hidden_size % block_k != 0:
            x_mask = x_mask & (first + k < hidden_size)[None, :]
            w_mask = w_mask & (first + k < hidden_size)[:, None]
        x = tl.load(x_at + first, mask=x_mask, other=0.0)
        gate_weight = tl.load(gate_at + first, mask=w_mask, other=0.0)
        if upcast:
            x, gate_weight = x.to(tl.float32), gate_weight.to(tl.float32)
        gate = tl.dot(x, gate_weight, gate, input_precision="ieee")
        if is_gated:
            up_weight = tl.load(up_at + first, mask=w_mask, other=0.0)
            if upcast:
                up_weight = up_weight.to(tl.float32)
            up = tl.dot(x, up_weight, up, input_precision="ieee")
    inner = activate(gate, activation)
    if is_gated:
        inner *= up
    out_at = activated + row.to(tl.int64)[:, None] * intermediate_size + column[None, :]
    tl.store(out_at, inner.to(activated.dtype.element_ty), mask=valid[:, None] & (column < intermediate_size)[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def _down_of_tiles(
    activated: tl.tensor,
    down: tl.tensor,
    topk_weights: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    weighted: tl.tensor,
    num_tiles: tl.tensor,
    num_experts: tl.constexpr,
    hidden_size: tl.constexpr,
    intermediate_size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    upcast: tl.constexpr,
) -> None:
    """Compute ``weight * down @ activated`` for the pairs of a tile, and write results in the order of pairs."""
    blocks_per_tile: tl.constexpr = (hidden_size + block_n - 1) // block_n
    tile = tl.program_id(0) // blocks_per_tile
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert >= num_experts:
        return
    row = tl.load(tiles + num_tiles + tile) + tl.arange(0, block_m)
    valid = row < tl.load(tiles + 2 * num_tiles + tile)
    column = (tl.program_id(0) % blocks_per_tile) * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    x_at = activated + row.to(tl.int64)[:, None] * intermediate_size + k[None, :]
    weight_at = down + expert * (hidden_size * intermediate_size) + column[None, :] * intermediate_size + k[:, None]
    out = tl.zeros([block_m, block_n], tl.float32)
    for first in range(0, intermediate_size, block_k):
        x_mask = valid[:, None]
        w_mask = (column < hidden_size)[None, :]
        if intermediate_size % block_k != 0:
            x_mask = x_mask & (first + k < intermediate_size)[None, :]
            w_mask = w_mask & (first + k < intermediate_size)[:, None]
        x = tl.load(x_at + first, mask=x_mask, other=0.0)
        weight = tl.load(weight_at + first, mask=w_mask, other=0.0)
        if upcast:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        out = tl.dot(x, weight, out, input_precision="ieee")
    pair = tl.load(pairs + row, mask=valid, other=0)
    out *= tl.load(topk_weights + pair, mask=valid, other=0.0)[:, None]
    out_at = weighted + pair.to(tl.int64)[:, None] * hidden_size + column[None, :]
    tl.store(out_at, out, mask=valid[:, None] & (column < hidden_size)[None, :])


@triton.jit
def _gate_up_of_pairs(
    hidden: tl.tensor,
    gate_up: tl.tensor,
    topk_ids: tl.tensor,
    activated: tl.tensor,
    num_selected: tl.constexpr,
    hidden_size: tl.constexpr,
    intermediate_size: tl.constexpr,
    activation: tl.constexpr,
    is_gated: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """Compute the same for one pair; threads' sums are reduced once, at the end."""
    rows_per_expert: tl.constexpr = 2 * intermediate_size if is_gated else intermediate_size
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(topk_ids + pair).to(tl.int64)
    column = tl.program_id(1) * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    x_at = hidden + pair // num_selected * hidden_size + k
    gate_at = gate_up + expert * (rows_per_expert * hidden_size) + column[:, None] * hidden_size + k[None, :]
    up_at = gate_at + intermediate_size * hidden_size
    gate = tl.zeros([block_n, block_k], tl.float32)
    up = tl.zeros([block_n, block_k], tl.float32)
    for first in range(0, hidden_size, block_k):
        within = first + k < hidden_size
        mask = (column < intermediate_size)[:, None] & within[None, :]
        x = tl.load(x_at + first, mask=within, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(gate_at + first, mask=mask, other=0.0).to(tl.float32) * x
        if is_gated:
            up += tl.load(up_at + first, mask=mask, other=0.0).to(tl.float32) * x
    inner = activate(tl.sum(gate, axis=1), activation)
    if is_gated:
        inner *= tl.sum(up, axis=1)
    out_at = activated + pair * intermediate_size + column
    tl.store(out_at, inner.to(activated.dtype.element_ty), mask=column < intermediate_size)


@triton.jit
def _down_of_tokens(
    activated: tl.tensor,
    down: tl.tensor,
    topk_weights: tl.tensor,
    topk_ids: tl.tensor,
    out: tl.tensor,
    num_selected: tl.constexpr,
    padded_selected: tl.constexpr,
    hidden_size: tl.constexpr,
    intermediate_size: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """Compute one token's sum of ``weight * down @ activated``, with all experts' loads in flight at once."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, padded_selected)
    pair = token * num_selected + slot
    expert = tl.load(topk_ids + pair, mask=slot < num_selected, other=0).to(tl.int64)
    weight = tl.load(topk_weights + pair, mask=slot < num_selected, other=0.0)
    column = tl.program_id(1) * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    x_at = activated + pair[:, None] * intermediate_size + k[None, :]
    row_at = expert[:, None] * (hidden_size * intermediate_size) + column[None, :] * intermediate_size
    row_mask = (slot < num_selected)[:, None] & (column < hidden_size)[None, :]
    products = tl.zeros([padded_selected, block_n, block_k], tl.float32)
    for first in range(0, intermediate_size, block_k):
        inner = first + k < intermediate_size
        x = tl.load(x_at + first, mask=(slot < num_selected)[:, None] & inner[None, :], other=0.0).to(tl.float32)
        weight_at = down + row_at[:, :, None] + (first + k)[None, None, :]
        matrix = tl.load(weight_at, mask=row_mask[:, :, None] & inner[None, None, :], other=0.0).to(tl.float32)
        products += matrix * x[:, None, :]
    result = tl.sum(tl.sum(products, axis=2) * weight[:, None], axis=0)
    tl.store(out + token * hidden_size + column, result.to(out.dtype.element_ty), mask=column < hidden_size)

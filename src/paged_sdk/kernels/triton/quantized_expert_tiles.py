"""Computes experts with repacked matrices for many tokens, sorted by expert into tiles, with matrix instructions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.quantized.triton_blocks import TritonBlockMatrix
from paged_sdk.kernels.triton.activation import activate
from paged_sdk.kernels.triton.blocks import ONE, loop_arguments
from paged_sdk.kernels.triton.expert_tiles import sort_by_expert
from paged_sdk.kernels.triton.quantized_tiles import tile_product
from paged_sdk.kernels.triton.tile_choices import TileChoice

__all__ = ["experts_by_tiles"]


def experts_by_tiles(
    x: Tensor,
    gate: TritonBlockMatrix | None,
    up: TritonBlockMatrix,
    down: TritonBlockMatrix,
    topk_weights: Tensor,
    topk_ids: Tensor,
    choice: TileChoice,
    *,
    num_experts: int,
    activation: KernelActivation,
) -> Tensor:
    """See :func:`~paged_sdk.kernels.triton.quantized_experts.quantized_experts`.

    All tensors must be contiguous, and there must be at least one token.
    """
    (num_tokens, num_selected), inner = topk_ids.shape, up.rows // num_experts
    first = up if gate is None else gate  # what is activated
    hidden, upcast = x.shape[1], not x.is_cuda
    pairs, tiles = sort_by_expert(topk_ids, num_experts, choice.block_m)
    num_tiles = tiles.shape[1]
    activated = x.new_empty(num_tokens * num_selected, inner)
    _gate_up_of_tiles[(num_tiles * triton.cdiv(inner, choice.block_n),)](
        x,
        *first.parts,
        *up.parts,
        pairs,
        tiles,
        activated,
        num_tiles,
        inner,
        up.cols,
        up.chunks,
        ONE,
        num_experts=num_experts,
        num_selected=num_selected,
        activation=activation,
        is_gated=gate is not None,
        block_m=choice.block_m,
        block_n=choice.block_n,
        deep=choice.deep,
        upcast=upcast,
        **loop_arguments(first, choice.block_w // first.format.words),
        **loop_arguments(up, choice.block_w // up.format.words, prefix="up_"),
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
    )
    # In float32: the outputs of a token's experts may nearly cancel, which would leave the rounding errors of 16 bits.
    weighted = x.new_empty(num_tokens, num_selected, hidden, dtype=torch.float32)
    _down_of_tiles[(num_tiles * triton.cdiv(hidden, choice.block_n),)](
        activated,
        *down.parts,
        topk_weights,
        pairs,
        tiles,
        weighted,
        num_tiles,
        hidden,
        down.cols,
        down.chunks,
        ONE,
        num_experts=num_experts,
        block_m=choice.block_m,
        block_n=choice.block_n,
        deep=choice.deep,
        upcast=upcast,
        **loop_arguments(down, choice.block_w // down.format.words),
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
    )
    return weighted.sum(1).to(x.dtype)


@triton.jit
def _rows_of_tile(tiles_ptr: tl.tensor, tile: tl.tensor, num_tiles: tl.tensor, block_m: tl.constexpr) -> tl.tensor:
    """Return the indices of a tile's sorted pairs, clamped to its expert's last, and which of them are valid."""
    end = tl.load(tiles_ptr + 2 * num_tiles + tile)
    row = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, block_m)
    return tl.minimum(row, end - 1), row < end


@triton.jit(do_not_specialize=["num_tiles"])
def _gate_up_of_tiles(
    x_ptr: tl.tensor,
    quants_ptr: tl.tensor,
    high_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    supers_ptr: tl.tensor,
    up_quants_ptr: tl.tensor,
    up_high_ptr: tl.tensor,
    up_scales_ptr: tl.tensor,
    up_minima_ptr: tl.tensor,
    up_supers_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tiles: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    chunks: tl.tensor,
    one: tl.tensor,
    num_experts: tl.constexpr,
    num_selected: tl.constexpr,
    activation: tl.constexpr,
    is_gated: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_c: tl.constexpr,
    masked: tl.constexpr,
    up_block_c: tl.constexpr,
    up_masked: tl.constexpr,
    deep: tl.constexpr,
    upcast: tl.constexpr,
    bits: tl.constexpr,
    offset: tl.constexpr,
    group: tl.constexpr,
    has_minima: tl.constexpr,
    has_supers: tl.constexpr,
    up_bits: tl.constexpr,
    up_offset: tl.constexpr,
    up_group: tl.constexpr,
    up_has_minima: tl.constexpr,
    up_has_supers: tl.constexpr,
) -> None:
    """Compute ``activation(gate @ x) * (up @ x)`` for the pairs of a tile, in sorted order; without gates,
    ``activation(up @ x)``.
    """
    blocks = tl.cdiv(rows, block_n)
    tile = tl.program_id(0) // blocks
    expert = tl.load(tiles_ptr + tile)
    if expert >= num_experts:
        return
    place, valid = _rows_of_tile(tiles_ptr, tile, num_tiles, block_m)
    token = tl.load(pairs_ptr + place) // num_selected
    n = tl.program_id(0) % blocks * block_n + tl.arange(0, block_n)
    x_row = x_ptr + token.to(tl.int64)[None, :] * cols
    row = (expert * rows + tl.minimum(n, rows - 1)).to(tl.int64)[:, None]
    gates = tile_product(
        x_row,
        quants_ptr,
        high_ptr,
        scales_ptr,
        minima_ptr,
        supers_ptr,
        row,
        cols,
        chunks,
        0,
        chunks,
        one,
        block_m,
        block_n,
        block_c,
        masked,
        deep,
        upcast,
        bits,
        offset,
        group,
        has_minima,
        has_supers,
    )
    inner = activate(gates, activation)
    if is_gated:
        inner *= tile_product(
            x_row,
            up_quants_ptr,
            up_high_ptr,
            up_scales_ptr,
            up_minima_ptr,
            up_supers_ptr,
            row,
            cols,
            chunks,
            0,
            chunks,
            one,
            block_m,
            block_n,
            up_block_c,
            up_masked,
            deep,
            upcast,
            up_bits,
            up_offset,
            up_group,
            up_has_minima,
            up_has_supers,
        )
    value = tl.trans(inner).to(out_ptr.dtype.element_ty)
    out = out_ptr + place.to(tl.int64)[:, None] * rows + n[None, :]
    tl.store(out, value, mask=valid[:, None] & (n < rows)[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def _down_of_tiles(
    x_ptr: tl.tensor,
    quants_ptr: tl.tensor,
    high_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    supers_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tiles: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    chunks: tl.tensor,
    one: tl.tensor,
    num_experts: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_c: tl.constexpr,
    masked: tl.constexpr,
    deep: tl.constexpr,
    upcast: tl.constexpr,
    bits: tl.constexpr,
    offset: tl.constexpr,
    group: tl.constexpr,
    has_minima: tl.constexpr,
    has_supers: tl.constexpr,
) -> None:
    """Compute ``weight * down @ activated`` for the pairs of a tile, and write results in the order of pairs."""
    blocks = tl.cdiv(rows, block_n)
    tile = tl.program_id(0) // blocks
    expert = tl.load(tiles_ptr + tile)
    if expert >= num_experts:
        return
    place, valid = _rows_of_tile(tiles_ptr, tile, num_tiles, block_m)
    n = tl.program_id(0) % blocks * block_n + tl.arange(0, block_n)
    products = tile_product(
        x_ptr + place.to(tl.int64)[None, :] * cols,
        quants_ptr,
        high_ptr,
        scales_ptr,
        minima_ptr,
        supers_ptr,
        (expert * rows + tl.minimum(n, rows - 1)).to(tl.int64)[:, None],
        cols,
        chunks,
        0,
        chunks,
        one,
        block_m,
        block_n,
        block_c,
        masked,
        deep,
        upcast,
        bits,
        offset,
        group,
        has_minima,
        has_supers,
    )
    pair = tl.load(pairs_ptr + place)
    value = tl.trans(products) * tl.load(weights_ptr + pair)[:, None]
    out = out_ptr + pair.to(tl.int64)[:, None] * rows + n[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (n < rows)[None, :])

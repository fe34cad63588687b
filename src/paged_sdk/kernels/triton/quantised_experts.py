"""A mixture of experts on repacked matrices (:mod:`paged_sdk.kernels.repacked`), stacked one below the other.

A pair is a token and one of its experts, as in :mod:`~paged_sdk.kernels.triton.fused_moe`, and the ways are its two:

- Few pairs hardly ever share an expert. Threads add up: gate, up and activation in one kernel, which multiplies what
  it stores by the pair's weight; then a token's result is one product, with the rows of its experts' matrices one after
  the other.
- Many pairs are sorted by expert into tiles, and weights are decoded within the products of tiles.

The grid is made of shapes alone: nothing waits for the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paged_sdk.kernels.repacked import CHUNK, RepackedMatrix
from paged_sdk.kernels.triton.activation import activate
from paged_sdk.kernels.triton.availability import num_multiprocessors
from paged_sdk.kernels.triton.expert_tiles import sort_by_expert
from paged_sdk.kernels.triton.quantised_few_rows import plan_rows
from paged_sdk.kernels.triton.quantised_row_sums import row_sums
from paged_sdk.kernels.triton.quantised_tiles import TilePlan, plan_tiles, tile_product
from paged_sdk.kernels.triton.repacked import ONE, format_arguments

__all__ = ["down_of_tokens", "gate_up_of_pairs", "many_pairs", "quantised_experts"]


def quantised_experts(
    x: Tensor,
    gate: RepackedMatrix,
    up: RepackedMatrix,
    down: RepackedMatrix,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    num_experts: int,
) -> Tensor:
    """``sum of weight * down @ (silu(gate @ x) * (up @ x))`` over each token's experts.

    :param x: ``[num_tokens, hidden]`` float32, float16 or bfloat16
    :param gate: ``[num_experts * inner, hidden]``; ``up`` likewise
    :param down: ``[num_experts * hidden, inner]``
    :param topk_weights: ``[num_tokens, num_selected]`` float32
    :param topk_ids: likewise, int64 or int32
    :returns: like ``x``
    """
    num_tokens, num_selected = topk_ids.shape
    x, topk_weights, topk_ids = x.contiguous(), topk_weights.contiguous(), topk_ids.contiguous()
    if num_tokens == 0:
        return x
    # Up to here an expert of two pairs is rare.
    if num_tokens == 1 or num_tokens * num_selected <= num_experts // 2:
        activated = gate_up_of_pairs(x, gate, up, topk_weights, topk_ids, num_experts=num_experts)
        return down_of_tokens(activated, down, topk_ids, num_experts=num_experts)
    pairs_of_expert = num_tokens * num_selected / num_experts
    # Tiles with room for half as many rows again as an expert has on average: a second one decodes weights again.
    plan = plan_tiles(gate, int(pairs_of_expert * 1.5), x.dtype, num_multiprocessors(x.device))
    return many_pairs(x, gate, up, down, topk_weights, topk_ids, plan, num_experts=num_experts)


def gate_up_of_pairs(
    x: Tensor, gate: RepackedMatrix, up: RepackedMatrix, topk_weights: Tensor, topk_ids: Tensor, *, num_experts: int
) -> Tensor:
    """``weight * silu(gate @ x) * (up @ x)`` of each pair on its own.

    :param x: ``[num_tokens, hidden]``, contiguous as ``topk_weights`` and ``topk_ids`` are; at least one token
    :returns: ``[num_tokens, num_selected * inner]``
    """
    (num_tokens, num_selected), inner = topk_ids.shape, gate.rows // num_experts
    num_pairs, chunks = num_tokens * num_selected, gate.scales.shape[1]
    plan = plan_rows(gate.format, num_pairs * inner, chunks, 1, num_multiprocessors(x.device))
    up_block_c = plan.block_c * gate.format.words // up.format.words
    out = x.new_empty(num_tokens, num_selected * inner)
    _gate_up_of_pairs[(triton.cdiv(inner, plan.block_n), num_pairs)](
        x,
        *gate.parts,
        *up.parts,
        topk_weights,
        topk_ids,
        out,
        inner,
        gate.cols,
        chunks,
        ONE,
        num_selected=num_selected,
        block_n=plan.block_n,
        block_c=plan.block_c,
        masked=chunks % plan.block_c != 0 or gate.cols % CHUNK != 0,
        up_block_c=up_block_c,
        up_masked=chunks % up_block_c != 0 or up.cols % CHUNK != 0,
        **format_arguments(gate),
        **{f"up_{name}": value for name, value in format_arguments(up).items()},
        num_warps=plan.num_warps,
    )
    return out


def down_of_tokens(x: Tensor, down: RepackedMatrix, topk_ids: Tensor, *, num_experts: int) -> Tensor:
    """The sum over a token's pairs of ``down @ x``.

    :param x: what :func:`gate_up_of_pairs` returns
    :returns: ``[num_tokens, hidden]``
    """
    (num_tokens, num_selected), hidden = topk_ids.shape, down.rows // num_experts
    chunks = down.scales.shape[1]
    plan = plan_rows(down.format, num_tokens * hidden, num_selected * chunks, 1, num_multiprocessors(x.device))
    out = x.new_empty(num_tokens, hidden)
    _down_of_tokens[(triton.cdiv(hidden, plan.block_n), num_tokens)](
        x,
        *down.parts,
        topk_ids,
        out,
        hidden,
        down.cols,
        chunks,
        ONE,
        num_selected=num_selected,
        block_n=plan.block_n,
        block_c=plan.block_c,
        masked=num_selected * chunks % plan.block_c != 0 or down.cols % CHUNK != 0,
        **format_arguments(down),
        num_warps=plan.num_warps,
    )
    return out


def many_pairs(
    x: Tensor,
    gate: RepackedMatrix,
    up: RepackedMatrix,
    down: RepackedMatrix,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: TilePlan,
    *,
    num_experts: int,
) -> Tensor:
    """:func:`quantised_experts` by tiles; all tensors contiguous. The plan's splits are not used."""
    (num_tokens, num_selected), inner = topk_ids.shape, gate.rows // num_experts
    hidden, upcast = x.shape[1], not x.is_cuda
    pairs, tiles = sort_by_expert(topk_ids, num_experts, plan.block_m)
    num_tiles = tiles.shape[1]
    chunks = gate.scales.shape[1]
    block_c, up_block_c = (plan.block_w // matrix.format.words for matrix in (gate, up))
    activated = x.new_empty(num_tokens * num_selected, inner)
    _gate_up_of_tiles[(num_tiles * triton.cdiv(inner, plan.block_n),)](
        x,
        *gate.parts,
        *up.parts,
        pairs,
        tiles,
        activated,
        num_tiles,
        inner,
        gate.cols,
        chunks,
        ONE,
        num_experts=num_experts,
        num_selected=num_selected,
        block_m=plan.block_m,
        block_n=plan.block_n,
        block_c=block_c,
        masked=chunks % block_c != 0 or gate.cols % CHUNK != 0,
        up_block_c=up_block_c,
        up_masked=chunks % up_block_c != 0 or gate.cols % CHUNK != 0,
        upcast=upcast,
        **format_arguments(gate),
        **{f"up_{name}": value for name, value in format_arguments(up).items()},
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    chunks, block_c = down.scales.shape[1], plan.block_w // down.format.words
    weighted = x.new_empty(num_tokens, num_selected, hidden)
    _down_of_tiles[(num_tiles * triton.cdiv(hidden, plan.block_n),)](
        activated,
        *down.parts,
        topk_weights,
        pairs,
        tiles,
        weighted,
        num_tiles,
        hidden,
        down.cols,
        chunks,
        ONE,
        num_experts=num_experts,
        block_m=plan.block_m,
        block_n=plan.block_n,
        block_c=block_c,
        masked=chunks % block_c != 0 or down.cols % CHUNK != 0,
        upcast=upcast,
        **format_arguments(down),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    return weighted.sum(1)  # torch adds up the halves' dtypes in float32


@triton.jit
def _gate_up_of_pairs(
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
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    chunks: tl.tensor,
    one: tl.tensor,
    num_selected: tl.constexpr,
    block_n: tl.constexpr,
    block_c: tl.constexpr,
    masked: tl.constexpr,
    up_block_c: tl.constexpr,
    up_masked: tl.constexpr,
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
    """``out[pair, n] = weight * silu(gate @ x) * (up @ x)``."""
    pair = tl.program_id(1)
    x_row = x_ptr + (pair // num_selected).to(tl.int64) * cols
    expert = tl.load(ids_ptr + pair).to(tl.int32)
    first = tl.program_id(0) * block_n
    first_row = expert * rows + first
    last_row = (expert + 1) * rows
    gates = row_sums(
        x_row,
        0,
        quants_ptr,
        high_ptr,
        scales_ptr,
        minima_ptr,
        supers_ptr,
        None,
        first_row,
        last_row,
        cols,
        chunks,
        0,
        chunks,
        one,
        1,
        block_n,
        block_c,
        masked,
        bits,
        offset,
        group,
        has_minima,
        has_supers,
    )
    ups = row_sums(
        x_row,
        0,
        up_quants_ptr,
        up_high_ptr,
        up_scales_ptr,
        up_minima_ptr,
        up_supers_ptr,
        None,
        first_row,
        last_row,
        cols,
        chunks,
        0,
        chunks,
        one,
        1,
        block_n,
        up_block_c,
        up_masked,
        up_bits,
        up_offset,
        up_group,
        up_has_minima,
        up_has_supers,
    )
    weight = tl.load(weights_ptr + pair)
    out = out_ptr + pair.to(tl.int64) * rows
    for r in tl.static_range(block_n):
        value = weight * activate(gates[r], False) * ups[r]
        tl.store(out + first + r, value.to(out_ptr.dtype.element_ty), mask=first + r < rows)


@triton.jit
def _down_of_tokens(
    x_ptr: tl.tensor,
    quants_ptr: tl.tensor,
    high_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    supers_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    chunks: tl.tensor,
    one: tl.tensor,
    num_selected: tl.constexpr,
    block_n: tl.constexpr,
    block_c: tl.constexpr,
    masked: tl.constexpr,
    bits: tl.constexpr,
    offset: tl.constexpr,
    group: tl.constexpr,
    has_minima: tl.constexpr,
    has_supers: tl.constexpr,
) -> None:
    """``out[token, n]``, the sum of all products of the token's pairs."""
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * block_n
    outputs = row_sums(
        x_ptr + token * num_selected * cols,
        0,
        quants_ptr,
        high_ptr,
        scales_ptr,
        minima_ptr,
        supers_ptr,
        ids_ptr + token * num_selected,
        first,
        rows,
        cols,
        chunks,
        0,
        num_selected * chunks,
        one,
        1,
        block_n,
        block_c,
        masked,
        bits,
        offset,
        group,
        has_minima,
        has_supers,
    )
    for r in tl.static_range(block_n):
        value = outputs[r].to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * rows + first + r, value, mask=first + r < rows)


@triton.jit
def _rows_of_tile(tiles_ptr: tl.tensor, tile: tl.tensor, num_tiles: tl.tensor, block_m: tl.constexpr) -> tl.tensor:
    """Places of a tile among the sorted pairs, the last one repeated past its expert's end; and which are its own."""
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
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_c: tl.constexpr,
    masked: tl.constexpr,
    up_block_c: tl.constexpr,
    up_masked: tl.constexpr,
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
    """``silu(gate @ x) * (up @ x)`` for the pairs of a tile, in sorted order."""
    dtype: tl.constexpr = tl.float32 if upcast else x_ptr.dtype.element_ty
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
        dtype,
        bits,
        offset,
        group,
        has_minima,
        has_supers,
    )
    ups = tile_product(
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
        dtype,
        up_bits,
        up_offset,
        up_group,
        up_has_minima,
        up_has_supers,
    )
    value = tl.trans(activate(gates, False) * ups).to(out_ptr.dtype.element_ty)
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
    upcast: tl.constexpr,
    bits: tl.constexpr,
    offset: tl.constexpr,
    group: tl.constexpr,
    has_minima: tl.constexpr,
    has_supers: tl.constexpr,
) -> None:
    """``weight * down @ activated`` for the pairs of a tile, in the order of tokens."""
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
        tl.float32 if upcast else x_ptr.dtype.element_ty,
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

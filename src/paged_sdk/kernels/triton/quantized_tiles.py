"""Multiplies repacked matrices with any number of rows of activations, with matrix instructions."""

from __future__ import annotations

import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.quantized.triton_blocks import TritonBlockMatrix
from paged_sdk.kernels.triton.block_pairs import decode_fields
from paged_sdk.kernels.triton.blocks import ONE, decode_tile, load_tile, loop_arguments, side_by_side
from paged_sdk.kernels.triton.quantized_splits import join, load_x, room_for_sums, split_evenly, with_adjacent_columns
from paged_sdk.kernels.triton.tile_choices import TileChoice

__all__ = ["TilePlan", "linear_by_tiles", "plan_tiles", "tile_product"]


@frozen
class TilePlan:
    """Describes how a product is divided into tiles.

    :ivar block_m: rows of activations per program, at least 16
    :ivar block_n: rows of the matrix per program
    :ivar block_w: words of each row that are decoded at once, at least 16
    :ivar num_splits: programs that share a row
    :ivar num_warps: warps per program
    :ivar num_stages: tiles in flight at once
    :ivar deep: whether all fields of the words form one product, as suits wgmma, or one product each
    """

    block_m: int
    block_n: int
    block_w: int
    num_splits: int
    num_warps: int
    num_stages: int
    deep: bool = False


def plan_tiles(matrix: TritonBlockMatrix, num_rows: int, choice: TileChoice, multiprocessors: int) -> TilePlan:
    """Plan the tiles of a product, and splits of the matrix's rows if there are too few tiles."""
    programs = triton.cdiv(num_rows, choice.block_m) * triton.cdiv(matrix.rows, choice.block_n)
    steps = triton.cdiv(matrix.quants.shape[1], choice.block_w)
    return TilePlan(
        block_m=choice.block_m,
        block_n=choice.block_n,
        block_w=choice.block_w,
        num_splits=max(1, min(choice.programs * multiprocessors // programs, triton.cdiv(steps, 4))),
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        deep=choice.deep,
    )


def linear_by_tiles(x: Tensor, matrix: TritonBlockMatrix, bias: Tensor | None, plan: TilePlan) -> Tensor:
    """Compute ``x @ matrix.T + bias`` for any number of rows of activations."""
    x = with_adjacent_columns(x)
    num_rows, block_c = x.shape[0], plan.block_w // matrix.format.words
    sums = room_for_sums(x, matrix, plan.num_splits)
    # Concurrent programs share tiles of the matrix rather than of the activations, which are smaller.
    grid = (triton.cdiv(num_rows, plan.block_m), triton.cdiv(matrix.rows, plan.block_n), plan.num_splits)
    _tile_kernel[grid](
        x,
        x.stride(0),
        *matrix.parts,
        bias if plan.num_splits == 1 else None,
        sums,
        num_rows,
        matrix.rows,
        matrix.cols,
        matrix.chunks,
        split_evenly(matrix.chunks, plan.num_splits, block_c),
        ONE,
        block_m=plan.block_m,
        block_n=plan.block_n,
        deep=plan.deep,
        upcast=not x.is_cuda,
        **loop_arguments(matrix, block_c),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    return sums if plan.num_splits == 1 else join(sums, bias, x.dtype)


@triton.jit
def tile_product(
    x_row: tl.tensor,
    quants_ptr: tl.tensor,
    high_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    supers_ptr: tl.tensor,
    row: tl.tensor,
    cols: tl.tensor,
    chunks: tl.tensor,
    first_chunk: tl.tensor,
    last_chunk: tl.tensor,
    one: tl.tensor,
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
) -> tl.tensor:
    """Multiply rows of a matrix with rows of activations over a range of chunks, float32 ``[block_n, block_m]``.

    The order of a dot product's terms does not matter, so each field of all words is one ``tl.dot`` with the matching
    activations: decoded weights are then already in the threads where ``mma.sync`` needs them. ``wgmma`` reads weights
    from shared memory, and several can be issued without waiting in between, so for it all fields are one ``tl.dot``.

    :param x_row: pointers to the rows of activations, ``[1, block_m]``
    :param row: rows of the matrix, int64 ``[block_n, 1]``
    :param deep: whether all fields are one ``tl.dot``
    :param upcast: whether to multiply in float32, with weights rounded to the activations' dtype first
    """
    dtype: tl.constexpr = x_row.dtype.element_ty
    words: tl.constexpr = 16 if bits == 8 else 8
    pairs: tl.constexpr = 32 // words
    pairs_of_group: tl.constexpr = pairs * group // 64
    # Decoding in pairs uses inline assembly, which only compiled kernels support.
    in_pairs: tl.constexpr = not upcast and dtype != tl.float32
    product: tl.constexpr = tl.float32 if upcast else dtype
    word = tl.arange(0, block_c * words)
    column = tl.arange(0, block_c * 64)[:, None]
    acc = tl.zeros([block_m, block_n] if deep else [block_n, block_m], tl.float32)
    for start in range(first_chunk, last_chunk, block_c):
        tile = load_tile(
            quants_ptr,
            high_ptr,
            scales_ptr,
            minima_ptr,
            supers_ptr,
            row,
            start,
            chunks,
            last_chunk,
            block_c,
            masked,
            bits,
            has_minima,
            has_supers,
        )
        # Weights past a split's end are zero; activations past the row's end must not be read.
        limit = tl.minimum(last_chunk * 64, cols)
        if in_pairs:
            fields = decode_fields(tile, block_c, dtype, bits, offset, group, has_minima, has_supers)
        else:
            fields = ()
            for p in tl.static_range(pairs):
                fields += decode_tile(
                    tile, one, p // pairs_of_group, p, block_c, dtype, bits, offset, has_minima, has_supers
                )
        if deep:
            k = start * 64 + column
            x = load_x(x_row + k, k, limit, masked).to(product)
            weights = tl.reshape(side_by_side(fields), [block_n, block_c * 64]).to(product)
            acc = tl.dot(tl.trans(x), tl.trans(weights), acc, input_precision="ieee")
        else:
            k = ((start + word // words) * 64 + word % words)[:, None]
            for f in tl.static_range(2 * pairs):
                x = load_x(x_row + k + f * words, k + f * words, limit, masked).to(product)
                weights = tl.reshape(fields[f], [block_n, block_c * words]).to(product)
                acc = tl.dot(weights, x, acc, input_precision="ieee")
    return tl.trans(acc) if deep else acc


@triton.jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    quants_ptr: tl.tensor,
    high_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    supers_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    chunks: tl.tensor,
    split_chunks: tl.tensor,
    one: tl.tensor,
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
    """Compute ``out[split, m, n]``, the sums over each split's chunks."""
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    split = tl.program_id(2)
    first_chunk = split * split_chunks
    # Rows past the last are clamped to it, which needs no mask; their results are not stored.
    acc = tile_product(
        x_ptr + tl.minimum(m, num_rows - 1).to(tl.int64)[None, :] * x_stride,
        quants_ptr,
        high_ptr,
        scales_ptr,
        minima_ptr,
        supers_ptr,
        tl.minimum(n, rows - 1).to(tl.int64)[:, None],
        cols,
        chunks,
        first_chunk,
        tl.minimum(first_chunk + split_chunks, chunks),
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
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + (split * num_rows + m).to(tl.int64)[:, None] * rows + n[None, :]
    live = (m < num_rows)[:, None] & (n < rows)[None, :]
    tl.store(out, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=live)

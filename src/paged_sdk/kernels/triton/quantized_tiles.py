"""Multiplies repacked matrices with any number of rows of activations, by matrix instructions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.triton.blocks import ONE, decode_tile, load_tile, loop_arguments
from paged_sdk.kernels.triton.quantized_splits import join, load_x, room_for_sums, split_evenly, with_adjacent_columns
from paged_sdk.kernels.triton_blocks import TritonBlockMatrix

__all__ = ["TilePlan", "linear_by_tiles", "plan_tiles", "tile_product"]


@frozen
class TilePlan:
    """Says how a product by tiles is cut.

    :ivar block_m: rows of activations to a program, at least 16
    :ivar block_n: rows of the matrix to a program
    :ivar block_w: words of each that are decoded at once, at least 16: each field's product is that deep
    :ivar num_splits: programs that share a row
    :ivar num_warps: warps of a program
    :ivar num_stages: tiles on their way at once
    """

    block_m: int
    block_n: int
    block_w: int
    num_splits: int
    num_warps: int
    num_stages: int


def plan_tiles(matrix: TritonBlockMatrix, num_rows: int, dtype: torch.dtype, multiprocessors: int) -> TilePlan:
    """Choose tiles as large as the activations fill, and splits where there are too few tiles."""
    # Products of float32 take more registers and more shared memory.
    block_m = min(32 if dtype == torch.float32 else 128, max(16, triton.next_power_of_2(num_rows)))
    block_n, block_w = (64, 32) if block_m < 128 else (128, 16)
    programs = triton.cdiv(num_rows, block_m) * triton.cdiv(matrix.rows, block_n)
    steps = triton.cdiv(matrix.quants.shape[1], block_w)
    # While memory sets the pace, programs that share a multiprocessor have more loads in flight; later they would only
    # make more sums to join.
    shared = 4 if block_m < 64 else 1
    return TilePlan(
        block_m=block_m,
        block_n=block_n,
        block_w=block_w,
        num_splits=min(triton.cdiv(shared * multiprocessors, programs), triton.cdiv(steps, 4)),
        num_warps=4 if block_m < 128 else 8,
        # More stages would not fit the 99 KiB of shared memory of smaller GPUs.
        num_stages=3 if block_m < 64 and dtype != torch.float32 else 2,
    )


def linear_by_tiles(x: Tensor, matrix: TritonBlockMatrix, bias: Tensor | None, plan: TilePlan) -> Tensor:
    """Do what :func:`quantized_linear` does, for any number of rows of activations."""
    x = with_adjacent_columns(x)
    num_rows, block_c = x.shape[0], plan.block_w // matrix.format.words
    sums = room_for_sums(x, matrix, plan.num_splits)
    # Programs that run side by side share tiles of the matrix, not of the activations, which are smaller.
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
    dtype: tl.constexpr,
    bits: tl.constexpr,
    offset: tl.constexpr,
    group: tl.constexpr,
    has_minima: tl.constexpr,
    has_supers: tl.constexpr,
) -> tl.tensor:
    """Multiply rows of a matrix with rows of activations over a range of chunks, float32 ``[block_n, block_m]``.

    The order in which a dot adds up does not matter, so each field of all words is one dot, with the activations that
    belong to it.

    :param x_row: where each row of activations begins, ``[1, block_m]``
    :param row: rows of the matrix, int64 ``[block_n, 1]``
    :param dtype: dtype of the dots' inputs
    """
    words: tl.constexpr = 16 if bits == 8 else 8
    groups: tl.constexpr = 64 // group
    pairs: tl.constexpr = 32 // words // groups
    word = tl.arange(0, block_c * words)
    acc = tl.zeros([block_n, block_m], tl.float32)
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
        k = ((start + word // words) * 64 + word % words)[:, None]
        # Activations past a split's end are multiplied by weights of zero, and those past the row's end do not exist.
        limit = tl.minimum(last_chunk * 64, cols)
        for g in tl.static_range(groups):
            for p in tl.static_range(g * pairs, (g + 1) * pairs):
                even, odd = decode_tile(tile, one, g, p, block_c, dtype, bits, offset, has_minima, has_supers)
                even_k = k + 2 * p * words
                odd_k = even_k + words
                x_even = load_x(x_row + even_k, even_k, limit, masked)
                x_odd = load_x(x_row + odd_k, odd_k, limit, masked)
                acc = tl.dot(even, x_even.to(dtype), acc, input_precision="ieee")
                acc = tl.dot(odd, x_odd.to(dtype), acc, input_precision="ieee")
    return acc


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
    upcast: tl.constexpr,
    bits: tl.constexpr,
    offset: tl.constexpr,
    group: tl.constexpr,
    has_minima: tl.constexpr,
    has_supers: tl.constexpr,
) -> None:
    """Compute ``out[split, m, n]``, one sum over each split's chunks."""
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    split = tl.program_id(2)
    first_chunk = split * split_chunks
    # Past the last row, the last one is read again: no mask is needed, and the result is not stored.
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
        tl.float32 if upcast else x_ptr.dtype.element_ty,
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

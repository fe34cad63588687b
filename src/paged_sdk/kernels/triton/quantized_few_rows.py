"""Multiplies repacked matrices with up to 4 rows of activations, by scalar threads without matrix instructions
(:mod:`~paged_sdk.kernels.triton.quantized_row_sums`).
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.quantized.triton_blocks import TritonBlockFormat, TritonBlockMatrix
from paged_sdk.kernels.triton.activation import activate
from paged_sdk.kernels.triton.blocks import ONE, format_arguments, loop_arguments
from paged_sdk.kernels.triton.quantized_row_sums import row_sums
from paged_sdk.kernels.triton.quantized_splits import join, room_for_sums, split_evenly, with_adjacent_columns

__all__ = ["FewRowsPlan", "linear_few_rows", "plan_few_rows", "plan_rows", "swiglu_few_rows"]

_WARPS_PER_MULTIPROCESSOR: Final = 10  # each with some KB of loads in flight


@frozen
class FewRowsPlan:
    """Describes how a product with few rows of activations is divided among programs.

    :ivar block_n: rows of the matrix per program
    :ivar block_c: chunks of each row that a program reads at once
    :ivar num_splits: programs that share a row
    :ivar num_warps: warps per program
    """

    block_n: int
    block_c: int
    num_splits: int
    num_warps: int


def plan_few_rows(matrix: TritonBlockMatrix, num_rows: int, multiprocessors: int) -> FewRowsPlan:
    """Plan the product of a matrix with ``num_rows`` rows of activations."""
    return plan_rows(matrix.format, matrix.rows, matrix.chunks, num_rows, multiprocessors)


def plan_rows(form: TritonBlockFormat, rows: int, chunks: int, num_rows: int, multiprocessors: int) -> FewRowsPlan:
    """Choose the most rows per program, and the fewest warps, that still fill the device.

    The rows of a program share the work on activations, and the sums of its threads are reduced once. Eight rows take
    fewer instructions than four, 4.0 instead of 4.6 per weight of Q4_K, but 168 registers instead of 64: an H200
    multiplies 14,336 x 4096 weights in 22.2 us with eight rows, 17.7 with four, and 21.9 with two. Prefetching makes
    the loop slower: 28.6 us with two tiles of four rows in flight. Q8_0, which was not swept, has eight rows.

    :param rows: rows of all matrices that are multiplied at once
    :param chunks: chunks per row
    :param num_rows: rows of activations
    """
    warp_chunks = 32 * 4 // form.words
    wanted = _WARPS_PER_MULTIPROCESSOR * multiprocessors
    most_warps = 4
    while most_warps > 1 and 2 * most_warps * warp_chunks > chunks:
        most_warps //= 2
    block_n = 8 if num_rows == 1 and form.bits == 8 else 4
    while block_n > 1 and triton.cdiv(rows, block_n) * most_warps < wanted:
        block_n //= 2
    programs = triton.cdiv(rows, block_n)
    num_warps = 1
    while num_warps < most_warps and programs * num_warps < wanted:
        num_warps *= 2
    block_c = num_warps * warp_chunks
    num_splits = min(triton.cdiv(multiprocessors, programs), triton.cdiv(chunks, 2 * block_c))
    return FewRowsPlan(block_n=block_n, block_c=block_c, num_splits=num_splits, num_warps=num_warps)


def linear_few_rows(x: Tensor, matrix: TritonBlockMatrix, bias: Tensor | None, plan: FewRowsPlan) -> Tensor:
    """Compute ``x @ matrix.T + bias`` for 1 to 4 rows of activations."""
    x = with_adjacent_columns(x)
    sums = room_for_sums(x, matrix, plan.num_splits)
    _few_rows_kernel[(triton.cdiv(matrix.rows, plan.block_n), plan.num_splits)](
        x,
        x.stride(0),
        *matrix.parts,
        bias if plan.num_splits == 1 else None,
        sums,
        matrix.rows,
        matrix.cols,
        matrix.chunks,
        split_evenly(matrix.chunks, plan.num_splits, plan.block_c),
        ONE,
        num_rows=x.shape[0],
        block_n=plan.block_n,
        **loop_arguments(matrix, plan.block_c),
        num_warps=plan.num_warps,
    )
    return sums if plan.num_splits == 1 else join(sums, bias, x.dtype)


def swiglu_few_rows(
    x: Tensor, gate: TritonBlockMatrix, up: TritonBlockMatrix, plan: FewRowsPlan, activation: KernelActivation = "silu"
) -> Tensor:
    """Compute ``activation(x @ gate.T) * (x @ up.T)`` for 1 to 4 rows of activations, without splits."""
    x = with_adjacent_columns(x)
    out = x.new_empty(x.shape[0], gate.rows)
    _swiglu_kernel[(triton.cdiv(gate.rows, plan.block_n),)](
        x,
        x.stride(0),
        *gate.parts,
        *up.parts,
        out,
        gate.rows,
        gate.cols,
        gate.chunks,
        ONE,
        activation=activation,
        num_rows=x.shape[0],
        block_n=plan.block_n,
        **loop_arguments(gate, plan.block_c),
        **format_arguments(up, prefix="up_"),
        num_warps=plan.num_warps,
    )
    return out


@triton.jit
def _few_rows_kernel(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    quants_ptr: tl.tensor,
    high_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    supers_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    chunks: tl.tensor,
    split_chunks: tl.tensor,
    one: tl.tensor,
    num_rows: tl.constexpr,
    block_n: tl.constexpr,
    block_c: tl.constexpr,
    masked: tl.constexpr,
    bits: tl.constexpr,
    offset: tl.constexpr,
    group: tl.constexpr,
    has_minima: tl.constexpr,
    has_supers: tl.constexpr,
) -> None:
    """Compute ``out[split, m, n]``, the sums over each split's chunks."""
    first_row = tl.program_id(0) * block_n
    split = tl.program_id(1)
    first_chunk = split * split_chunks
    outputs = row_sums(
        x_ptr,
        x_stride,
        quants_ptr,
        high_ptr,
        scales_ptr,
        minima_ptr,
        supers_ptr,
        None,
        first_row,
        rows,
        cols,
        chunks,
        first_chunk,
        tl.minimum(first_chunk + split_chunks, chunks),
        one,
        num_rows,
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
        n = first_row + r
        bias = 0.0
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + n, mask=n < rows, other=0.0).to(tl.float32)
        for m in tl.static_range(num_rows):
            value = (outputs[r * num_rows + m] + bias).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (split * num_rows + m) * rows + n, value, mask=n < rows)


@triton.jit
def _swiglu_kernel(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
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
    out_ptr: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    chunks: tl.tensor,
    one: tl.tensor,
    activation: tl.constexpr,
    num_rows: tl.constexpr,
    block_n: tl.constexpr,
    block_c: tl.constexpr,
    masked: tl.constexpr,
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
    """Compute ``out[m, n]``, the activated output of ``gate`` times the output of ``up``."""
    first_row = tl.program_id(0) * block_n
    gates = row_sums(
        x_ptr,
        x_stride,
        quants_ptr,
        high_ptr,
        scales_ptr,
        minima_ptr,
        supers_ptr,
        None,
        first_row,
        rows,
        cols,
        chunks,
        0,
        chunks,
        one,
        num_rows,
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
        x_ptr,
        x_stride,
        up_quants_ptr,
        up_high_ptr,
        up_scales_ptr,
        up_minima_ptr,
        up_supers_ptr,
        None,
        first_row,
        rows,
        cols,
        chunks,
        0,
        chunks,
        one,
        num_rows,
        block_n,
        block_c,
        masked,
        up_bits,
        up_offset,
        up_group,
        up_has_minima,
        up_has_supers,
    )
    for r in tl.static_range(block_n):
        n = first_row + r
        for m in tl.static_range(num_rows):
            value = activate(gates[r * num_rows + m], activation) * ups[r * num_rows + m]
            tl.store(out_ptr + m * rows + n, value.to(out_ptr.dtype.element_ty), mask=n < rows)

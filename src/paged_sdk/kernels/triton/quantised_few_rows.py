"""Products of repacked matrices with up to 4 rows of activations, added up by threads.

A program reads some rows of the matrix, its threads side by side along the row, 16 bytes each, and keeps one float32
sum per thread and output. Weights are decoded once for all rows of activations. On an H200 there is time for some six
instructions per weight of Q4_K before they, not memory, set the pace, so their number decides: see
:func:`~paged_sdk.kernels.triton.repacked.decode_pair`.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.activation import GatedActivation
from paged_sdk.kernels.repacked import CHUNK, RepackedMatrix
from paged_sdk.kernels.triton.activation import activate
from paged_sdk.kernels.triton.quantised_splits import join, load_x, room_for_sums, split_evenly, with_adjacent_columns
from paged_sdk.kernels.triton.repacked import (
    ONE,
    decode_pair,
    format_arguments,
    group_minimum,
    group_scale,
    load_high,
    load_scales,
    load_words,
)

__all__ = ["MAX_FEW_ROWS", "FewRowsPlan", "linear_few_rows", "plan_few_rows", "swiglu_few_rows"]

MAX_FEW_ROWS: Final = 4
"""Rows of activations up to which products are added up by threads: more cost more instructions than decoding does."""

_WARPS_PER_MULTIPROCESSOR: Final = 10  # each with some KB on their way
_QUAD: tl.constexpr = tl.constexpr(4)  # words that a thread loads at once: 16 bytes


@frozen
class FewRowsPlan:
    """How a product with few rows of activations is cut.

    :ivar block_n: rows of the matrix to a program
    :ivar block_c: chunks that a program reads of each at once
    :ivar num_splits: programs that share a row
    :ivar num_warps: warps of a program
    """

    block_n: int
    block_c: int
    num_splits: int
    num_warps: int


def plan_few_rows(matrix: RepackedMatrix, num_rows: int, multiprocessors: int) -> FewRowsPlan:
    """As many rows to a program, and as few warps, as leave the device full.

    The rows of a program share the work on activations, and a program joins the sums of its threads but once: compiled
    for an H200, Q4_K's loop has 4.0 instructions per weight with eight rows and 4.6 with four. Eight rows with high
    bits take 250 registers, and with several rows of activations they spill.
    """
    chunks = matrix.scales.shape[1]
    warp_chunks = 32 * 4 // matrix.format.words
    wanted = _WARPS_PER_MULTIPROCESSOR * multiprocessors
    most_warps = 4
    while most_warps > 1 and 2 * most_warps * warp_chunks > chunks:
        most_warps //= 2
    block_n = 8 if num_rows == 1 and matrix.high is None else 4
    while block_n > 1 and triton.cdiv(matrix.rows, block_n) * most_warps < wanted:
        block_n //= 2
    programs = triton.cdiv(matrix.rows, block_n)
    num_warps = 1
    while num_warps < most_warps and programs * num_warps < wanted:
        num_warps *= 2
    block_c = num_warps * warp_chunks
    num_splits = min(triton.cdiv(multiprocessors, programs), triton.cdiv(chunks, 2 * block_c))
    return FewRowsPlan(block_n=block_n, block_c=block_c, num_splits=num_splits, num_warps=num_warps)


def linear_few_rows(x: Tensor, matrix: RepackedMatrix, bias: Tensor | None, plan: FewRowsPlan) -> Tensor:
    """:func:`quantised_linear` of 1 to 4 rows of activations."""
    x = with_adjacent_columns(x)
    num_rows, chunks = x.shape[0], matrix.scales.shape[1]
    sums = room_for_sums(x, matrix, plan.num_splits)
    split_chunks = split_evenly(chunks, plan.num_splits, plan.block_c)
    _few_rows_kernel[(triton.cdiv(matrix.rows, plan.block_n), plan.num_splits)](
        x,
        x.stride(0),
        *matrix.parts,
        bias if plan.num_splits == 1 else None,
        sums,
        matrix.rows,
        matrix.cols,
        chunks,
        split_chunks,
        ONE,
        num_rows=num_rows,
        block_n=plan.block_n,
        block_c=plan.block_c,
        masked=chunks % plan.block_c != 0 or matrix.cols % CHUNK != 0,
        **format_arguments(matrix),
        num_warps=plan.num_warps,
    )
    return sums if plan.num_splits == 1 else join(sums, bias, x.dtype)


def swiglu_few_rows(
    x: Tensor, gate: RepackedMatrix, up: RepackedMatrix, plan: FewRowsPlan, activation: GatedActivation = "silu"
) -> Tensor:
    """``activation(x @ gate.T) * (x @ up.T)`` of 1 to 4 rows of activations; the plan's splits are not used."""
    x = with_adjacent_columns(x)
    num_rows, chunks = x.shape[0], gate.scales.shape[1]
    out = x.new_empty(num_rows, gate.rows)
    _swiglu_kernel[(triton.cdiv(gate.rows, plan.block_n),)](
        x,
        x.stride(0),
        *gate.parts,
        *up.parts,
        out,
        gate.rows,
        gate.cols,
        chunks,
        ONE,
        gelu=activation == "gelu_tanh",
        num_rows=num_rows,
        block_n=plan.block_n,
        block_c=plan.block_c,
        masked=chunks % plan.block_c != 0 or gate.cols % CHUNK != 0,
        **format_arguments(gate),
        **{f"up_{name}": value for name, value in format_arguments(up).items()},
        num_warps=plan.num_warps,
    )
    return out


@triton.jit
def _append(items: tl.tensor, item: tl.tensor) -> tl.tensor:
    return items + (item,)  # noqa: RUF005 - Triton's compiler does not unpack


@triton.jit
def _by_quads(values: tl.tensor) -> tl.tensor:
    """Sums of four neighbours, which lie in one thread."""
    return tl.sum(tl.reshape(values, [values.shape[0] // _QUAD, _QUAD]), 1)


@triton.jit
def _row_sums(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    quants_ptr: tl.tensor,
    high_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    supers_ptr: tl.tensor,
    first_row: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    chunks: tl.tensor,
    first_chunk: tl.tensor,
    last_chunk: tl.tensor,
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
) -> tl.tensor:
    """Products of ``block_n`` rows of the matrix with ``num_rows`` rows of activations, over a range of chunks.

    One-dimensional tensors throughout, so that every operation has the threads where the loads have them, and nothing
    passes through shared memory before the last sum.

    :returns: float32, output ``r * num_rows + m`` for row r of the matrix and m of the activations
    """
    words: tl.constexpr = 16 if bits == 8 else 8
    groups: tl.constexpr = 64 // group
    pairs: tl.constexpr = 32 // words // groups  # of fields, to a group
    even_lead: tl.constexpr = 1 if bits == 8 else 16  # what even fields count less than odd ones: activations make up
    levels: tl.constexpr = 1 << bits
    word = tl.arange(0, block_c * words)
    quad = tl.arange(0, block_c * words // _QUAD)
    sums = ()
    for _ in tl.static_range(block_n * num_rows):
        sums = _append(sums, tl.zeros([block_c * words // _QUAD], tl.float32))
    for start in range(first_chunk, last_chunk, block_c):
        chunk = start + word // words
        quad_chunk = start + quad // (words // _QUAD)
        word_mask = chunk < last_chunk if masked else None
        quad_mask = quad_chunk < last_chunk if masked else None
        quants = ()
        high = ()
        scales = ()
        for r in tl.static_range(block_n):
            # Past the last row, the last one again: no mask is needed, and its result is not stored.
            row = tl.minimum(first_row + r, rows - 1).to(tl.int64)
            offsets = row * (chunks * words) + start * words + word
            loaded = load_words(quants_ptr + offsets, word_mask)
            quants = _append(quants, loaded)
            high = _append(high, load_high(high_ptr, offsets, word_mask, loaded, bits))
            words_of_scales = load_scales(
                scales_ptr, minima_ptr, supers_ptr, row, quad_chunk, chunks, quad_mask, has_minima, has_supers
            )
            scales = _append(scales, words_of_scales)
        for g in tl.static_range(groups):
            xs = ()
            leads = ()
            totals = ()
            for m in tl.static_range(num_rows):
                evens = tl.zeros([block_c * words], tl.float32)
                odds = tl.zeros([block_c * words], tl.float32)
                for p in tl.static_range(pairs):
                    k = chunk * 64 + words * 2 * (g * pairs + p) + word % words
                    even = load_x(x_ptr + m * x_stride + k, k, cols, masked).to(tl.float32)
                    odd = load_x(x_ptr + m * x_stride + k + words, k + words, cols, masked).to(tl.float32)
                    evens += even
                    odds += odd
                    xs = _append(_append(xs, even * even_lead), odd)
                # What the ones of decoded weights, and their offset, add to the sum.
                leads = _append(leads, -(even_lead + offset / levels) * evens - (1 + offset / levels) * odds)
                if has_minima:
                    totals = _append(totals, _by_quads(evens + odds))
            new = ()
            for r in tl.static_range(block_n):
                products = leads
                for p in tl.static_range(pairs):
                    even, odd = decode_pair(quants[r], high[r], one, g * pairs + p, bits)
                    added = ()
                    for m in tl.static_range(num_rows):
                        product = products[m] + even * xs[2 * (m * pairs + p)]
                        added = _append(added, product + odd * xs[2 * (m * pairs + p) + 1])
                    products = added
                scale = group_scale(scales[r], g, levels, has_minima, has_supers)
                for m in tl.static_range(num_rows):
                    total = sums[r * num_rows + m] + scale * _by_quads(products[m])
                    if has_minima:
                        total -= group_minimum(scales[r], g, has_supers) * totals[m]
                    new = _append(new, total)
            sums = new
    outputs = ()
    for i in tl.static_range(block_n * num_rows):
        outputs = _append(outputs, tl.sum(sums[i], 0))
    return outputs


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
    """``out[split, m, n]``, one sum over each split's chunks."""
    first_row = tl.program_id(0) * block_n
    split = tl.program_id(1)
    first_chunk = split * split_chunks
    outputs = _row_sums(
        x_ptr,
        x_stride,
        quants_ptr,
        high_ptr,
        scales_ptr,
        minima_ptr,
        supers_ptr,
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
    gelu: tl.constexpr,
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
    """``out[m, n]``, an output of the gate with the other factor's of the same row."""
    first_row = tl.program_id(0) * block_n
    gates = _row_sums(
        x_ptr,
        x_stride,
        quants_ptr,
        high_ptr,
        scales_ptr,
        minima_ptr,
        supers_ptr,
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
    ups = _row_sums(
        x_ptr,
        x_stride,
        up_quants_ptr,
        up_high_ptr,
        up_scales_ptr,
        up_minima_ptr,
        up_supers_ptr,
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
            value = activate(gates[r * num_rows + m], gelu) * ups[r * num_rows + m]
            tl.store(out_ptr + m * rows + n, value.to(out_ptr.dtype.element_ty), mask=n < rows)

"""Multiplies rows of repacked matrices with a few rows of activations, by scalar threads.

A program reads several rows of the matrix, with neighboring threads along a row, 16 bytes each, and keeps one float32
sum per thread and output. Weights are decoded once for all rows of activations.

The number of instructions is the bottleneck: see :func:`~paged_sdk.kernels.triton.blocks.decode_pair`. A multiprocessor
issues 128 thread instructions per cycle, so in the time in which memory delivers a weight of Q4_K (0.578 bytes), an
H200 can issue 3.6 (132 multiprocessors at 1.755 GHz, 4.8 TB/s; 4.0 at its highest clock, 1.98 GHz), an H100 5.1 to 5.8
(3.35 TB/s), an A100 5.5 (108 at 1.41 GHz, 2.04 TB/s), and an RTX 4090 24 (128 at 2.52 GHz, 1.01 TB/s). At most half of
them may be integer instructions. Q8_0 has 1.8 times as much time per weight, Q6_K 1.4 times. Compiled, Q4_K's loop
takes 4.0 instructions per weight with eight rows of the matrix per program, and 4.6 with four. Measured with one row of
activations, an H200 reads Q4_K at 0.46 of its copy bandwidth (docs/benchmarks/gpu.md); for more rows, see
:data:`~paged_sdk.kernels.triton.tile_choices.MAX_FEW_ROWS`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paged_sdk.kernels.triton.blocks import (
    decode_pair,
    group_minimum,
    group_scale,
    load_high,
    load_scale_words,
    load_words,
    scale_parts,
)
from paged_sdk.kernels.triton.quantized_splits import load_x

__all__ = ["row_sums"]

_QUAD: tl.constexpr = tl.constexpr(4)  # words that a thread loads at once: 16 bytes


@triton.jit
def _append(items: tl.tensor, item: tl.tensor) -> tl.tensor:
    return items + (item,)  # noqa: RUF005 - Triton's compiler does not unpack


@triton.jit
def _by_quads(values: tl.tensor) -> tl.tensor:
    """Sum groups of four neighbors, which are in one thread."""
    return tl.sum(tl.reshape(values, [values.shape[0] // _QUAD, _QUAD]), 1)


@triton.jit
def row_sums(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    quants_ptr: tl.tensor,
    high_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    supers_ptr: tl.tensor,
    experts_ptr: tl.tensor,
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
    """Multiply ``block_n`` rows of the matrix with ``num_rows`` rows of activations, over a range of chunks.

    All tensors are one-dimensional, so that every operation keeps the layout of the loads, and nothing passes through
    shared memory before the last sum.

    :param experts_ptr: None, or the numbers of expert matrices that are treated as concatenated by columns: the first
        ``chunks`` chunks of a row belong to the first matrix, and so on; ``rows`` and ``cols`` are those of one matrix
    :returns: float32, output ``r * num_rows + m`` for row r of the matrix and row m of the activations
    """
    words: tl.constexpr = 16 if bits == 8 else 8
    groups: tl.constexpr = 64 // group
    pairs: tl.constexpr = 32 // words // groups  # pairs of fields per group
    even_lead: tl.constexpr = 1 if bits == 8 else 16  # even fields are smaller by this factor; activations make up
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
        word_offset = start * words + word
        matrix = 0
        quad_matrix = 0
        x_start = 0
        limit = cols
        if experts_ptr is not None:
            slot = chunk // chunks
            quad_slot = quad_chunk // chunks
            chunk -= slot * chunks
            quad_chunk -= quad_slot * chunks
            word_offset = chunk * words + word % words
            # Tell the compiler that all words of one load are of one matrix.
            matrix = tl.max_constancy(load_words(experts_ptr + slot, word_mask), words).to(tl.int64) * rows
            quad_matrix = load_words(experts_ptr + quad_slot, quad_mask).to(tl.int64) * rows
            x_start = slot * cols
            limit = tl.where(word_mask, cols, 0) if masked else cols
        quants = ()
        high = ()
        scales = ()
        for r in tl.static_range(block_n):
            # Rows past the last are clamped to it, which needs no mask; their results are not stored.
            row = tl.minimum(first_row + r, rows - 1).to(tl.int64)
            offsets = (matrix + row) * (chunks * words) + word_offset
            loaded = load_words(quants_ptr + offsets, word_mask)
            quants = _append(quants, loaded)
            high = _append(high, load_high(high_ptr, offsets, word_mask, loaded, bits))
            words_of_scales = load_scale_words(
                scales_ptr,
                minima_ptr,
                supers_ptr,
                quad_matrix + row,
                quad_chunk,
                chunks,
                quad_mask,
                has_minima,
                has_supers,
            )
            scales = _append(scales, scale_parts(words_of_scales, has_minima, has_supers))
        for g in tl.static_range(groups):
            xs = ()
            leads = ()
            totals = ()
            for m in tl.static_range(num_rows):
                evens = tl.zeros([block_c * words], tl.float32)
                odds = tl.zeros([block_c * words], tl.float32)
                for p in tl.static_range(pairs):
                    k = chunk * 64 + words * 2 * (g * pairs + p) + word % words
                    even = load_x(x_ptr + m * x_stride + x_start + k, k, limit, masked).to(tl.float32)
                    odd = load_x(x_ptr + m * x_stride + x_start + k + words, k + words, limit, masked).to(tl.float32)
                    evens += even
                    odds += odd
                    xs = _append(_append(xs, even * even_lead), odd)
                # Subtract the contribution of the ones in decoded weights, and of the fields' offset.
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

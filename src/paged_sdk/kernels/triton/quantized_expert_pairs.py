"""Computes experts with repacked matrices for few tokens, as matrix-vector products by scalar threads.

One kernel computes gate, up and activation, and multiplies the result by the pair's weight. A token's output is then a
single product with its experts' down matrices, concatenated by columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.quantized.triton_blocks import TritonBlockMatrix
from paged_sdk.kernels.triton.activation import activate
from paged_sdk.kernels.triton.availability import num_multiprocessors
from paged_sdk.kernels.triton.blocks import ONE, loop_arguments
from paged_sdk.kernels.triton.quantized_few_rows import plan_rows
from paged_sdk.kernels.triton.quantized_row_sums import row_sums

__all__ = ["down_of_tokens", "gate_up_of_pairs"]


def gate_up_of_pairs(
    x: Tensor,
    gate: TritonBlockMatrix | None,
    up: TritonBlockMatrix,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    num_experts: int,
    activation: KernelActivation,
) -> Tensor:
    """Compute ``weight * activation(gate @ x) * (up @ x)`` for each pair; without gates ``weight * activation(up @
    x)``.

    :param x: ``[num_tokens, hidden]``, contiguous like ``topk_weights`` and ``topk_ids``; at least one token
    :returns: ``[num_tokens, num_selected * inner]``
    """
    (num_tokens, num_selected), inner = topk_ids.shape, up.rows // num_experts
    first = up if gate is None else gate  # what is activated
    num_pairs = num_tokens * num_selected
    plan = plan_rows(first.format, num_pairs * inner, up.chunks, 1, num_multiprocessors(x.device))
    out = x.new_empty(num_tokens, num_selected * inner)
    _gate_up_of_pairs[(triton.cdiv(inner, plan.block_n), num_pairs)](
        x,
        *first.parts,
        *up.parts,
        topk_weights,
        topk_ids,
        out,
        inner,
        up.cols,
        up.chunks,
        ONE,
        num_selected=num_selected,
        activation=activation,
        is_gated=gate is not None,
        block_n=plan.block_n,
        **loop_arguments(first, plan.block_c),
        **loop_arguments(up, plan.block_c * first.format.words // up.format.words, prefix="up_"),
        num_warps=plan.num_warps,
    )
    return out


def down_of_tokens(x: Tensor, down: TritonBlockMatrix, topk_ids: Tensor, *, num_experts: int) -> Tensor:
    """Sum ``down @ x`` over each token's pairs.

    :param x: the result of :func:`gate_up_of_pairs`
    :returns: ``[num_tokens, hidden]``
    """
    (num_tokens, num_selected), hidden = topk_ids.shape, down.rows // num_experts
    plan = plan_rows(down.format, num_tokens * hidden, num_selected * down.chunks, 1, num_multiprocessors(x.device))
    out = x.new_empty(num_tokens, hidden)
    _down_of_tokens[(triton.cdiv(hidden, plan.block_n), num_tokens)](
        x,
        *down.parts,
        topk_ids,
        out,
        hidden,
        down.cols,
        down.chunks,
        ONE,
        num_selected=num_selected,
        block_n=plan.block_n,
        **loop_arguments(down, plan.block_c, num_matrices=num_selected),
        num_warps=plan.num_warps,
    )
    return out


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
    activation: tl.constexpr,
    is_gated: tl.constexpr,
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
    """Compute ``out[pair, n]``: the activated output of the first matrix, times that of ``up`` if it is a gate, times
    the pair's weight.
    """
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
    if is_gated:
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
        value = weight * activate(gates[r], activation)
        if is_gated:
            value *= ups[r]
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
    """Compute ``out[token, n]``, the sum over the token's pairs."""
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

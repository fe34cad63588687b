"""Multiplies with :mod:`paged_sdk.kernels.quantized.triton_blocks` matrices. The number of rows of activations decides
how:

- One row (:mod:`~paged_sdk.kernels.triton.quantized_few_rows`): scalar threads compute a matrix-vector product.
- Fewer than 256 rows (:mod:`~paged_sdk.kernels.triton.quantized_tiles`): tiles of weights are decoded to the
  activations' dtype and multiplied by matrix instructions.
- More rows, where arithmetic is the bottleneck: the matrix is decoded to memory once, and torch multiplies it.

If outputs make too few programs, the rows of the matrix are split among programs too, and a second kernel sums the
parts in a fixed order, so results do not vary between runs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.quantized.triton_blocks import TritonBlockMatrix
from paged_sdk.kernels.triton.activation import gated_activation_of
from paged_sdk.kernels.triton.availability import num_multiprocessors
from paged_sdk.kernels.triton.blocks import dequantize
from paged_sdk.kernels.triton.quantized_few_rows import linear_few_rows, plan_few_rows, swiglu_few_rows
from paged_sdk.kernels.triton.quantized_tiles import linear_by_tiles, plan_tiles
from paged_sdk.kernels.triton.tile_choices import (
    DECODE_ALL_ROWS,
    MAX_FEW_ROWS,
    TILE_CHOICES,
    matrix_units,
    tile_choice,
)

__all__ = ["quantized_linear", "quantized_swiglu"]


def quantized_linear(x: Tensor, matrix: TritonBlockMatrix, bias: Tensor | None = None) -> Tensor:
    """See :func:`paged_sdk.kernels.quantized_linear.quantized_linear`."""
    num_rows = x.shape[0]
    if num_rows == 0:
        return x.new_empty(0, matrix.rows)
    multiprocessors = num_multiprocessors(x.device)
    if num_rows <= MAX_FEW_ROWS:
        return linear_few_rows(x, matrix, bias, plan_few_rows(matrix, num_rows, multiprocessors))
    if num_rows < DECODE_ALL_ROWS:
        choice = tile_choice(TILE_CHOICES[matrix_units(x.device, x.dtype)], num_rows)
        return linear_by_tiles(x, matrix, bias, plan_tiles(matrix, num_rows, choice, multiprocessors))
    return F.linear(x, dequantize(matrix, x.dtype), bias)


def quantized_swiglu(
    x: Tensor, gate: TritonBlockMatrix, up: TritonBlockMatrix, activation: KernelActivation = "silu"
) -> Tensor:
    """See :func:`paged_sdk.kernels.quantized_linear.quantized_swiglu`."""
    num_rows = x.shape[0]
    if 0 < num_rows <= MAX_FEW_ROWS:
        plan = plan_few_rows(gate, num_rows, num_multiprocessors(x.device))
        return swiglu_few_rows(x, gate, up, plan, activation)
    return gated_activation_of(quantized_linear(x, gate), quantized_linear(x, up), activation)

"""Loads activations and sums the results of splits, for all products with repacked matrices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_sdk.kernels.quantized.triton_blocks import TritonBlockMatrix

__all__ = ["join", "load_x", "room_for_sums", "split_evenly", "with_adjacent_columns"]


def with_adjacent_columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def split_evenly(chunks: int, num_splits: int, block_c: int) -> int:
    """Return the number of chunks per split, a multiple of ``block_c``."""
    return triton.cdiv(triton.cdiv(chunks, num_splits), block_c) * block_c


def room_for_sums(x: Tensor, matrix: TritonBlockMatrix, num_splits: int) -> Tensor:
    """Allocate the result, or with several splits a float32 result for each."""
    if num_splits == 1:
        return x.new_empty(x.shape[0], matrix.rows)
    return x.new_empty(num_splits, x.shape[0], matrix.rows, dtype=torch.float32)


def join(sums: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sum the results of splits, and add the bias."""
    out = sums.new_empty(sums.shape[1:], dtype=dtype)
    block = 256
    _join_kernel[(triton.cdiv(out.numel(), block),)](
        sums, bias, out, out.numel(), out.shape[1], num_splits=len(sums), block=block, num_warps=2
    )
    return out


@triton.jit
def load_x(pointers: tl.tensor, k: tl.tensor, cols: tl.tensor, masked: tl.constexpr) -> tl.tensor:
    return tl.load(pointers, mask=k < cols, other=0.0) if masked else tl.load(pointers)


@triton.jit(do_not_specialize=["size"])
def _join_kernel(
    sums_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.tensor,
    rows: tl.tensor,
    num_splits: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute ``out[m, n]``, the sum of ``sums[split, m, n]`` over splits, plus the bias."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    mask = i < size
    total = tl.zeros([block], tl.float32)
    for split in range(num_splits):
        total += tl.load(sums_ptr + split * size + i, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + i % rows, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=mask)

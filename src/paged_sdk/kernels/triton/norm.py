"""Normalizes rows by their root mean square; each row is read once."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_rms_norm", "rms_norm"]

_ELEMENTS: Final = 2048  # elements per program; shorter rows (heads of queries and keys) share a program


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`paged_sdk.kernels.norm.rms_norm`."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :func:`paged_sdk.kernels.norm.add_rms_norm`."""
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Launch the kernel; return the normalized rows, and ``x + residual``, or ``x`` itself without a residual."""
    size = x.shape[-1]
    num_heads = weight.numel() // size
    rows = _by_heads(x, num_heads)
    out = x.new_empty(x.shape)
    added = None if residual is None else _by_heads(residual, num_heads)
    total = None if residual is None else x.new_empty(x.shape)
    num_rows = rows.shape[0] * num_heads
    if num_rows:
        block = triton.next_power_of_2(size)
        block_r = max(1, _ELEMENTS // block)
        _rms_norm_kernel[(triton.cdiv(num_rows, block_r),)](
            rows,
            added,
            weight,
            out,
            total,
            rows.stride(0),
            rows.stride(1),
            0 if added is None else added.stride(0),
            0 if added is None else added.stride(1),
            num_rows,
            num_heads,
            eps,
            size=size,
            block_r=block_r,
            block=block,
            num_warps=min(max(block // 512, 4), 16),
        )
    return out, x if total is None else total


def _by_heads(x: Tensor, num_heads: int) -> Tensor:
    """Reshape to ``[n, num_heads, size]`` with adjacent columns, as a view if the strides of ``x`` allow."""
    rows = x.reshape(-1, num_heads, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    total_ptr: tl.tensor,
    stride: tl.tensor,
    head_stride: tl.tensor,
    residual_stride: tl.tensor,
    residual_head_stride: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    eps: tl.tensor,
    size: tl.constexpr,
    block_r: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0) * block_r + tl.arange(0, block_r)
    outer, head = (row // num_heads).to(tl.int64)[:, None], (row % num_heads)[:, None]
    column = tl.arange(0, block)[None, :]
    mask = (row < num_rows)[:, None] & (column < size)
    place = row.to(tl.int64)[:, None] * size + column
    x = tl.load(x_ptr + outer * stride + head * head_stride + column, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        added = residual_ptr + outer * residual_stride + head * residual_head_stride + column
        rounded = (x + tl.load(added, mask=mask, other=0.0).to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + place, rounded, mask=mask)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + head * size + column, mask=mask, other=0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, 1) / size + eps)[:, None]
    scaled = normed.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + place, scaled.to(out_ptr.dtype.element_ty), mask=mask)

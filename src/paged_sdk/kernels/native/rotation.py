"""Activations for a product in int8: rotated, and quantised with one scale per row.

With H orthonormal, ``(x H)(W H)^T`` is ``x W^T``, and H spreads channels that are far larger than the rest over a
block, so that one scale per row loses little (QuaRot, Ashkboos et al., 2024, arXiv 2404.00456). H is block-diagonal,
its blocks Sylvester's matrices over the square root of their size; the native kernel applies them by the fast
Walsh-Hadamard transform. A row that holds NaN or Inf has a scale of NaN and touches no other row.
"""

from __future__ import annotations

from ctypes import byref
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import check_matrix, check_scales, float_vector, pointer
from paged_sdk.kernels.native.structures import ACTIVATIONS, DTYPES, NOT_GATED, Rotate

__all__ = ["gated_rotate_quantise", "rotate_quantise"]

_MAX_BLOCK = 256
_LANES = 16  # smaller blocks stay with torch: no packed format has such rows


def rotate_quantise(
    workspace: Workspace | None,
    x: Tensor,
    *,
    block: int,
    dtype: torch.dtype = torch.uint8,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Rotate blocks of columns, and round each row to int8.

    :param workspace: of the engine that calls; None: torch does it
    :param x: [M, K] float32 or bfloat16; rows contiguous
    :param block: columns that are rotated together, a power of two up to 256 that divides K; 1: no rotation
    :param dtype: int8, or uint8 for codes plus 128, which oneDNN multiplies 30 times faster
    :param norm_weight: [K]: ``x / rms(x) * norm_weight`` is what is rotated
    :param norm_eps: added to the mean square
    :returns: codes [M, K] of ``dtype`` and scales [M] float32: rotated x is about ``scale * code``
    :raises ConfigError: shapes, dtypes or strides do not fit
    """
    cols = x.shape[-1]
    check_matrix("x", x, (len(x), cols))
    _check_block(block, cols)
    weight = float_vector("norm_weight", norm_weight, cols)
    if workspace is None or block < _LANES:
        values = x.float()
        if weight is not None:
            values = F.rms_norm(values, (cols,), weight, norm_eps)
        return _rotate_quantise_reference(values, block, dtype)
    args = Rotate(
        x=x.data_ptr(), x_stride=x.stride(0), norm_weight=pointer(weight), activation=NOT_GATED, norm_eps=norm_eps
    )
    return _run(workspace, args, x, cols, block, dtype)


def gated_rotate_quantise(
    workspace: Workspace | None,
    x: Tensor,
    scales: Tensor | None,
    *,
    block: int,
    activation: Literal["silu", "gelu_tanh"],
    dtype: torch.dtype = torch.uint8,
) -> tuple[Tensor, Tensor]:
    """Gate, rotate blocks of columns, and round each row to int8: what a down projection takes.

    :param workspace: of the engine that calls; None: torch does it
    :param x: [M, 2 I] float32 or bfloat16, gate then up; rows contiguous
    :param scales: [M] float32, still to multiply the rows of ``x``; None: they are done
    :param block: columns that are rotated together, a power of two up to 256 that divides I; 1: no rotation
    :param activation: ``activation(gate) * up`` is what is rotated; ``gelu_tanh`` is the tanh approximation
    :param dtype: int8, or uint8 for codes plus 128
    :returns: codes [M, I] of ``dtype`` and scales [M] float32
    :raises ConfigError: shapes, dtypes or strides do not fit
    """
    cols = x.shape[-1] // 2
    check_matrix("x", x, (len(x), 2 * cols))
    check_scales(scales, len(x))
    _check_block(block, cols)
    if activation not in ACTIVATIONS:
        raise ConfigError.of("activation", activation, f"one of {', '.join(ACTIVATIONS)}")
    if workspace is None or block < _LANES:
        values = x.float() if scales is None else x.float() * scales[:, None]
        gate, up = values.chunk(2, -1)
        act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return _rotate_quantise_reference(act * up, block, dtype)
    args = Rotate(x=x.data_ptr(), x_stride=x.stride(0), row_scales=pointer(scales), activation=ACTIVATIONS[activation])
    return _run(workspace, args, x, cols, block, dtype)


def _run(
    workspace: Workspace, args: Rotate, x: Tensor, cols: int, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if dtype not in (torch.int8, torch.uint8):
        raise ConfigError.of("dtype", dtype, "int8 or uint8")
    out = torch.empty(len(x), cols, dtype=dtype)
    scales = torch.empty(len(x))
    args.out, args.scales, args.workspace = out.data_ptr(), scales.data_ptr(), workspace.handle
    args.num_rows, args.cols, args.block, args.dtype = len(x), cols, block, DTYPES[x.dtype]
    args.is_unsigned, args.num_threads = dtype == torch.uint8, workspace.num_threads
    if workspace.library.functions.paged_rotate(workspace.library.level, byref(args)):
        raise MemoryError("no memory for the scratch of a native rotation")
    return out, scales


def _check_block(block: int, cols: int) -> None:
    if not 1 <= block <= _MAX_BLOCK or block & (block - 1) or cols % block:
        raise ConfigError.of("block", block, f"a power of two from 1 to {_MAX_BLOCK} that divides {cols}")


def _rotate_quantise_reference(values: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if dtype not in (torch.int8, torch.uint8):
        raise ConfigError.of("dtype", dtype, "int8 or uint8")
    if block > 1:
        values = (values.view(len(values), values.shape[-1] // block, block) @ _hadamard(block)).flatten(-2)
    largest = values.abs().amax(-1)
    usable = largest.isfinite() & (largest >= 1e-30)
    scales = torch.where(usable, largest / 127, torch.where(largest.isfinite(), 0.0, torch.nan))
    codes = torch.where(usable[:, None], values / scales[:, None], 0.0).round_()
    return (codes.to(torch.int8) if dtype == torch.int8 else codes.add_(128).to(torch.uint8)), scales


def _hadamard(size: int) -> Tensor:
    """Sylvester's matrix, orthonormal."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix.div_(size**0.5)

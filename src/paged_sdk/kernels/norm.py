"""Normalizes by the root mean square (Zhang and Sennrich, 2019, arXiv 1910.07467), also after a residual addition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.checks import check_tensor
from paged_sdk.kernels.fallback import device_of, runs_on_triton

__all__ = ["add_rms_norm", "add_rms_norm_reference", "rms_norm", "rms_norm_reference"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute ``x / rms(x) * weight`` over the last dimension, with the mean in float32.

    The weight's dtype decides where rounding happens: the normalized vector is rounded to it before the multiplication.
    Llama-like models pass weights in the dtype of ``x``; gemma, which rounds after the multiplication, passes float32
    weights with its offset of 1 already added.

    :param x: ``[..., hidden_size]`` float32, float16 or bfloat16
    :param weight: ``[hidden_size]``, or ``[num_heads, hidden_size]`` for ``x`` ``[..., num_heads, hidden_size]``; of
        the dtype of ``x`` or float32
    :returns: a new tensor like ``x``, contiguous
    :raises ConfigError: shapes, dtypes or devices do not fit
    """
    _check(x, weight)
    if runs_on_triton("rms_norm", x):
        from paged_sdk.kernels.triton import norm as triton_kernels

        with device_of(x):
            return triton_kernels.rms_norm(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute ``x + residual``, and normalize the sum.

    :param x: as in :func:`rms_norm`; ``residual`` likewise
    :returns: the normalized sum, and the sum in the dtype of ``x``; new tensors, contiguous
    :raises ConfigError: shapes, dtypes or devices do not fit
    """
    _check(x, weight)
    check_tensor("residual", residual, tuple(x.shape), (x.dtype,), x.device)
    if runs_on_triton("add_rms_norm", x):
        from paged_sdk.kernels.triton import norm as triton_kernels

        with device_of(x):
            return triton_kernels.add_rms_norm(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement :func:`rms_norm` with torch operations."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(wide), x.shape[-1:], None, eps).mul_(weight).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Implement :func:`add_rms_norm` with torch operations."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.dim() not in (1, 2) or weight.shape != x.shape[x.dim() - weight.dim() :]:
        raise ConfigError.of("weight.shape", tuple(weight.shape), f"the last one or two dimensions of {tuple(x.shape)}")
    check_tensor("weight", weight, tuple(weight.shape), (x.dtype, torch.float32), x.device)

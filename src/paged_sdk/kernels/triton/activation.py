"""Computes the activations of MLPs."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["activate", "gated_activation", "gated_activation_of"]

_BLOCK: Final = 1024


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """See :func:`paged_sdk.kernels.activation.gated_activation`."""
    size = gate_up.shape[-1] // 2
    gate, up = gate_up.reshape(-1, 2 * size).chunk(2, dim=-1)
    return gated_activation_of(gate, up, activation).view(*gate_up.shape[:-1], size)


def gated_activation_of(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Compute ``activation(gate) * up`` for two tensors, each ``[rows, size]`` with adjacent columns.

    :param activation: one of :data:`~paged_sdk.kernels.activation.KernelActivation`
    """
    rows, size = gate.shape
    out = gate.new_empty(rows, size)
    if out.numel():
        _gated_activation_kernel[(rows, triton.cdiv(size, _BLOCK))](
            gate,
            up,
            out,
            gate.stride(0),
            up.stride(0),
            size,
            activation=activation,
            block=_BLOCK,
            num_warps=4,
        )
    return out


@triton.jit
def activate(x: tl.tensor, activation: tl.constexpr) -> tl.tensor:
    """Compute an activation: tanh-approximated GELU as ``x * sigmoid(2 u)``, since ``0.5 (1 + tanh(u)) = sigmoid(2
    u)``.
    """
    if activation == "relu2":
        return tl.where(x < 0.0, 0.0, x * x)  # NaN stays NaN
    slope = 1.5957691216057308 * (1.0 + 0.044715 * x * x) if activation == "gelu_tanh" else 1.0
    return x * tl.sigmoid(x * slope)


@triton.jit
def _gated_activation_kernel(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    size: tl.tensor,
    activation: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < size
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + column, (activate(gate, activation) * up).to(out_ptr.dtype.element_ty), mask=mask)

"""Computes linear layers with quantized weights: with Triton kernels on CUDA; elsewhere weights are decoded first.

Each function is also a custom op in ``torch.ops.paged_sdk``, which takes the parts of a matrix as separate tensors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.activation import KernelActivation, check_activation, gated_activation_reference
from paged_sdk.kernels.checks import FLOATS, check_tensor
from paged_sdk.kernels.fallback import device_of, runs_on_triton
from paged_sdk.kernels.quantized.triton_blocks import TritonBlockMatrix

__all__ = [
    "quantized_linear",
    "quantized_linear_reference",
    "quantized_swiglu",
    "quantized_swiglu_reference",
]


def quantized_linear(x: Tensor, matrix: TritonBlockMatrix, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias``, summed in float32.

    With more than one row of float16 or bfloat16, the Triton kernels round weights to that dtype before the product.

    :param x: ``[num_rows, cols]`` float32, float16 or bfloat16
    :param bias: ``[rows]`` of the dtype of ``x``, or None
    :returns: ``[num_rows, rows]`` of the dtype of ``x``
    :raises ConfigError: shapes, dtypes or devices do not fit
    """
    out: Tensor = _linear(x, *matrix.parts, bias, matrix.tensor_type, matrix.cols)
    return out


def quantized_swiglu(
    x: Tensor, gate: TritonBlockMatrix, up: TritonBlockMatrix, activation: KernelActivation = "silu"
) -> Tensor:
    """Compute ``activation(x @ gate.T) * (x @ up.T)``; for one row, in one kernel.

    :param x: ``[num_rows, cols]`` float32, float16 or bfloat16
    :param gate: ``[size, cols]``; ``up`` likewise, of any type
    :returns: ``[num_rows, size]`` of the dtype of ``x``
    :raises ConfigError: shapes, dtypes or devices do not fit
    """
    out: Tensor = _swiglu(x, *gate.parts, gate.tensor_type, *up.parts, up.tensor_type, gate.cols, activation)
    return out


def quantized_linear_reference(x: Tensor, matrix: TritonBlockMatrix, bias: Tensor | None = None) -> Tensor:
    """Implement :func:`quantized_linear` with torch operations."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), matrix.decoded(wide), None if bias is None else bias.to(wide)).to(x.dtype)


def quantized_swiglu_reference(
    x: Tensor, gate: TritonBlockMatrix, up: TritonBlockMatrix, activation: KernelActivation = "silu"
) -> Tensor:
    """Implement :func:`quantized_swiglu` with torch operations."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    both = torch.cat((quantized_linear_reference(wide, gate), quantized_linear_reference(wide, up)), dim=1)
    return gated_activation_reference(both, activation).to(x.dtype)


@torch.library.custom_op("paged_sdk::quantized_linear", mutates_args=())
def _linear(
    x: Tensor,
    quants: Tensor,
    high: Tensor | None,
    scales: Tensor,
    minima: Tensor | None,
    supers: Tensor | None,
    bias: Tensor | None,
    tensor_type: int,
    cols: int,
) -> Tensor:
    matrix = TritonBlockMatrix(tensor_type, cols, quants, high, scales, minima, supers)
    check_tensor("x", x, ("num_rows", cols), FLOATS, quants.device)
    if bias is not None:
        check_tensor("bias", bias, (matrix.rows,), (x.dtype,), x.device)
    if runs_on_triton("quantized_linear", x):
        from paged_sdk.kernels.triton import quantized_linear as triton_kernels

        with device_of(x):
            return triton_kernels.quantized_linear(x, matrix, bias)
    return quantized_linear_reference(x, matrix, bias)


@_linear.register_fake
def _(x: Tensor, quants: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], quants.shape[0])


@torch.library.custom_op("paged_sdk::quantized_swiglu", mutates_args=())
def _swiglu(
    x: Tensor,
    gate_quants: Tensor,
    gate_high: Tensor | None,
    gate_scales: Tensor,
    gate_minima: Tensor | None,
    gate_supers: Tensor | None,
    gate_type: int,
    up_quants: Tensor,
    up_high: Tensor | None,
    up_scales: Tensor,
    up_minima: Tensor | None,
    up_supers: Tensor | None,
    up_type: int,
    cols: int,
    activation: str,
) -> Tensor:
    gate = TritonBlockMatrix(gate_type, cols, gate_quants, gate_high, gate_scales, gate_minima, gate_supers)
    up = TritonBlockMatrix(up_type, cols, up_quants, up_high, up_scales, up_minima, up_supers)
    check_tensor("x", x, ("num_rows", cols), FLOATS, gate_quants.device)
    if (up.rows, up.chunks) != (gate.rows, gate.chunks):
        raise ConfigError.of("up", f"{up.rows} rows", f"{gate.rows} rows of {cols} columns, as gate has")
    kind = check_activation(activation)
    if runs_on_triton("quantized_swiglu", x):
        from paged_sdk.kernels.triton import quantized_linear as triton_kernels

        with device_of(x):
            return triton_kernels.quantized_swiglu(x, gate, up, kind)
    return quantized_swiglu_reference(x, gate, up, kind)


@_swiglu.register_fake
def _(x: Tensor, gate_quants: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], gate_quants.shape[0])

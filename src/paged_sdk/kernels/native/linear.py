"""Computes linear layers on packed weights, each in one native call.

For quantized weights, activations are quantized to int8 in groups of 16 columns with float32 scales. For many rows,
weights and activations are quantized to int8 after the same Hadamard transform over every 32 columns, with a scale per
row and 256 columns: the transform preserves the product and spreads outlier channels, so that such coarse scales lose
little (QuaRot, Ashkboos et al., 2024, arXiv 2404.00456). Products are exact integers per group or block of columns, and
sums have a fixed order, so a row's result does not depend on the number of rows or threads. A row with NaN or Inf gives
NaN in every column, and affects no other row.

With dense weights, products are exact and sums are float32 in a fixed order; activations are rounded to bfloat16 if the
weights are bfloat16. Non-finite activations give NaN or Inf, in their own row only.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref
from typing import Final

import numpy as np
import torch
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.packed import PackedWeight
from paged_sdk.kernels.native.structures import DTYPES, Linear, Weight

__all__ = [
    "NATIVE_FLOATS",
    "NativeLinear",
    "check_matrix",
    "check_weights",
    "describe",
    "float_vector",
    "pointer",
    "same_order",
    "undefined",
]

NATIVE_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the rows that the kernels multiply."""


def float_vector(name: str, vector: Tensor | None, size: int) -> Tensor | None:
    """Check the size of a bias or norm weight, and return it as contiguous float32, copied only if necessary."""
    if vector is None:
        return None
    if vector.shape != (size,):
        raise ConfigError.of(f"{name}.shape", tuple(vector.shape), f"({size},)")
    return vector.to(torch.float32).contiguous()


def pointer(tensor: Tensor | None) -> int | None:
    """Return a tensor's address, or None without a tensor."""
    return None if tensor is None else tensor.data_ptr()


def undefined(shape: tuple[int, ...], dtype: type[np.generic] = np.float32) -> Tensor:
    """Return a tensor of undefined numbers in CPU memory.

    This is what ``torch.empty`` does, without torch's dispatcher. Between two steps, when the weights have replaced its
    code in the caches, that took 100 us of SmolLM2's 4,300 per token (AMD Zen 4).
    """
    return torch.from_numpy(np.empty(shape, dtype=dtype))


def describe(target: Weight, weight: PackedWeight, bias: Tensor | None) -> None:
    """Fill the C structure of a weight; the tensors must outlive it."""
    target.data = weight.data.data_ptr()
    target.bias, target.order = pointer(bias), pointer(weight.order)
    target.format, target.rows, target.cols = weight.tensor_type, weight.rows, weight.cols
    target.in_hadamard = weight.in_hadamard


def check_weights(weights: Sequence[PackedWeight]) -> None:
    """Check that weights can share an input: equal columns and column order, and the same form of activations.

    :raises ConfigError: they cannot
    """
    cols = {weight.cols for weight in weights}
    if len(cols) != 1:
        raise ConfigError.of("weights", sorted(cols), "at least one weight, all with the same number of columns")
    orders = [weight.order for weight in weights]
    if not all(same_order(orders[0], order) for order in orders):
        raise ConfigError.of("order", "of weights of one input", "the same for all of them")
    if len({_operand(weight) for weight in weights}) != 1:
        formats = [weight.format for weight in weights]
        raise ConfigError.of("weights", formats, "all in blocks, all in the Hadamard form, or all dense of one dtype")


def _operand(weight: PackedWeight) -> str:
    """Return the form of the activations that a weight is multiplied with."""
    if weight.dense_dtype is not None:
        return weight.format
    return "hadamard" if weight.in_hadamard else "groups"


def same_order(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two matrices have their columns in the same order."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def check_matrix(
    name: str,
    rows: Tensor,
    shape: tuple[int, int],
    dtypes: tuple[torch.dtype, ...] = NATIVE_FLOATS,
) -> None:
    """Check that the kernels can read or write a floating-point matrix in place.

    :raises ConfigError: the shape, dtype, strides or device do not fit
    """
    if rows.shape != shape:
        raise ConfigError.of(f"{name}.shape", tuple(rows.shape), str(shape))
    if rows.dtype not in dtypes:
        raise ConfigError.of(f"{name}.dtype", rows.dtype, " or ".join(map(str, dtypes)))
    if rows.stride(1) != 1 or rows.device.type != "cpu":
        raise ConfigError.of(f"{name}.stride()", rows.stride(), "rows that are contiguous, in CPU memory")


def _bind_rows(args: Linear, x: Tensor, cols: int) -> None:
    """Check the input of one call, and set it among the call's arguments."""
    num_rows = x.shape[0]
    check_matrix("x", x, (num_rows, cols))
    args.x, args.x_stride = x.data_ptr(), x.stride(0)
    args.num_rows, args.dtype = num_rows, DTYPES[x.dtype]


class NativeLinear:
    """Computes linear layers of one input in one call, optionally with an RMSNorm before and a residual addition after.

    :param workspace: scratch memory of the calling engine; used by one call at a time
    :param weights: packed [N_i, K] matrices of the same K; their outputs are concatenated
    :param biases: one per weight, [N_i] or None
    :param norm_weight: [K]: the input is ``x / rms(x) * norm_weight``; None: the input is ``x``
    :param norm_eps: added to the mean square
    :raises ConfigError: shapes do not fit, or the weights need activations in different forms
    """

    def __init__(
        self,
        workspace: Workspace,
        weights: Sequence[PackedWeight],
        *,
        biases: Sequence[Tensor | None] | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> None:
        check_weights(weights)
        if biases is not None and len(biases) != len(weights):
            raise ConfigError.of("biases", len(biases), f"one per weight, {len(weights)}")
        self.in_features: int = weights[0].cols
        self.out_features: int = sum(weight.rows for weight in weights)
        self.num_bytes: int = sum(weight.num_bytes for weight in weights)
        self._workspace = workspace
        self._weights = tuple(weights)
        self._biases = [
            float_vector("bias", bias, weight.rows)
            for weight, bias in zip(weights, biases or [None] * len(weights), strict=True)
        ]
        self._norm_weight = float_vector("norm_weight", norm_weight, self.in_features)
        self._table = (Weight * len(weights))()
        for target, weight, bias in zip(self._table, self._weights, self._biases, strict=True):
            describe(target, weight, bias)
        self._args = Linear(
            norm_weight=pointer(self._norm_weight),
            norm_eps=norm_eps,
            weights=addressof(self._table),
            num_weights=len(weights),
            workspace=workspace.handle,
            num_threads=workspace.num_threads,
        )
        self._reference = byref(self._args)

    def __call__(self, x: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Compute ``concat(W_i x + b_i) + residual``.

        :param x: [M, K] float32, bfloat16 or float16; rows contiguous
        :param residual: [M, sum N_i] of the same dtype; may be ``out``
        :param out: [M, sum N_i] of the same dtype, not overlapping ``x``; a new tensor by default
        :returns: ``out``
        :raises ConfigError: shapes, dtypes or strides do not fit
        """
        args, shape = self._args, (x.shape[0], self.out_features)
        _bind_rows(args, x, self.in_features)
        if out is None:
            out = undefined(shape) if x.dtype is torch.float32 else torch.empty(shape, dtype=x.dtype)
        else:
            check_matrix("out", out, shape, (x.dtype,))
        if residual is not None:
            check_matrix("residual", residual, shape, (x.dtype,))
            args.residual_stride = residual.stride(0)
        args.residual, args.likeliest = pointer(residual), None
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        self._run()
        return out

    def likeliest(self, x: Tensor) -> Tensor:
        """Return the column of each row's largest output; the lowest if several are equal.

        :param x: [M, K] float32; rows contiguous
        :returns: int64 [M], -1 where an output is NaN or the largest is not finite
        :raises ConfigError: shape, dtype or strides do not fit
        """
        if x.dtype is not torch.float32:
            raise ConfigError.of("x.dtype", x.dtype, "torch.float32")
        args, found = self._args, undefined((x.shape[0],), np.int64)
        _bind_rows(args, x, self.in_features)
        args.residual, args.out, args.likeliest = None, None, found.data_ptr()
        self._run()
        return found

    def _run(self) -> None:
        library = self._workspace.library
        if library.functions.paged_linear(library.level, self._reference):
            raise MemoryError("no memory for the scratch of a native linear layer")

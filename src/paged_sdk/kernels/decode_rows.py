"""Decodes selected rows of a :mod:`paged_sdk.kernels.quantized.triton_blocks` matrix, such as token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.kernels.checks import check_tensor
from paged_sdk.kernels.fallback import device_of, runs_on_triton
from paged_sdk.kernels.quantized.triton_blocks import TritonBlockMatrix

__all__ = ["decode_rows", "decode_rows_reference"]


def decode_rows(matrix: TritonBlockMatrix, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode selected rows of a matrix.

    :param indices: ``[n]`` int64 or int32, on the matrix's device
    :param dtype: float32, float16 or bfloat16
    :returns: ``[n, cols]``
    :raises ConfigError: the shape, dtype or device of ``indices`` differs
    """
    check_tensor("indices", indices, ("n",), (torch.int64, torch.int32), matrix.quants.device)
    if runs_on_triton("decode_rows", matrix.quants):
        from paged_sdk.kernels.triton import blocks as triton_kernels

        with device_of(matrix.quants):
            return triton_kernels.dequantize_rows(matrix, indices, dtype)
    return decode_rows_reference(matrix, indices, dtype)


def decode_rows_reference(matrix: TritonBlockMatrix, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Implement :func:`decode_rows` with torch operations."""
    return matrix.at(indices).decoded(dtype)

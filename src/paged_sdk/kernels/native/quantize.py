"""Quantizes dense weights to GGUF blocks with the native library: in-situ quantization on the CPU.

The results are bit-identical to those of :mod:`paged_sdk.kernels.quantized.quantize`, which defines them.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.linear import check_matrix
from paged_sdk.kernels.native.structures import WEIGHT_DTYPES
from paged_sdk.kernels.native.structures_packing import Quantize
from paged_sdk.kernels.quantized.quantize import not_finite, writable_format

__all__ = ["quantize_blocks"]

_NOT_FINITE = 2


def quantize_blocks(
    library: NativeLibrary,
    weight: Tensor,
    tensor_type: int,
    *,
    importance: Tensor | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """Quantize a matrix to GGUF blocks.

    :param weight: [rows, cols] float32, bfloat16 or float16; rows contiguous
    :param tensor_type: ggml's number of the type, one of :data:`~paged_sdk.kernels.quantized.quantize.QUANTIZED_TYPES`
    :param importance: float32 [cols], contiguous: weights of the columns' squared errors, positive and about 1 on
        average; None: equal weights
    :param num_threads: torch's own number by default
    :returns: uint8 [rows, bytes of a row]; the result does not depend on the number of threads
    :raises UnsupportedQuantizationError: the type cannot be written, or ``cols`` is no multiple of its block
    :raises CheckpointError: ``weight`` has NaN, Inf or magnitudes above 32,768
    :raises ConfigError: the dtype or the strides do not fit
    """
    if weight.dim() != 2:
        raise ConfigError.of("weight.shape", tuple(weight.shape), "[rows, cols]")
    rows, cols = weight.shape
    check_matrix("weight", weight, (rows, cols), tuple(WEIGHT_DTYPES))
    if importance is not None:
        if importance.dim() != 1:
            raise ConfigError.of("importance.shape", tuple(importance.shape), "[cols]")
        check_matrix("importance", importance[None], (1, cols), (torch.float32,))
    form = writable_format(tensor_type, cols)
    out = torch.empty(rows, cols // form.elements * form.num_bytes, dtype=torch.uint8)
    args = Quantize(
        x=weight.data_ptr(),
        importance=None if importance is None else importance.data_ptr(),
        out=out.data_ptr(),
        x_stride=weight.stride(0),
        format=tensor_type,
        rows=rows,
        cols=cols,
        dtype=WEIGHT_DTYPES[weight.dtype],
        num_threads=torch.get_num_threads() if num_threads is None else num_threads,
    )
    if library.functions.paged_quantize(library.level, byref(args)) == _NOT_FINITE:
        raise not_finite()
    return out

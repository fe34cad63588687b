"""Dense weights into GGUF blocks, and into the native kernels' panels: what in-situ quantization runs.

A group of 32 weights (16 for Q6_K) takes the scale, and minimum where the format has one, of the smallest squared error
among some twenty roundings, each with its least-squares fit; every weight then takes the code that is nearest with the
scales as they are stored. The block layouts are ggml's (``ggml-common.h``).
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from paged_sdk.errors import CheckpointError, ConfigError, UnsupportedQuantizationError
from paged_sdk.kernels.gguf_blocks import BLOCK_FORMATS, BlockFormat
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.linear import check_matrix
from paged_sdk.kernels.native.packed import PACKED_TYPES, PackedWeight, pack_gguf
from paged_sdk.kernels.native.structures import WEIGHT_DTYPES, Quantize

__all__ = ["quantize", "quantize_blocks"]

_NOT_FINITE = 2


def quantize(
    library: NativeLibrary, weight: Tensor, tensor_type: int, *, num_threads: int | None = None
) -> PackedWeight:
    """Quantize a matrix and pack it for the native kernels. Arguments and errors as :func:`quantize_blocks`."""
    blocks = quantize_blocks(library, weight, tensor_type, num_threads=num_threads)
    return pack_gguf(library, blocks, tensor_type, *weight.shape, num_threads=num_threads)


def quantize_blocks(
    library: NativeLibrary, weight: Tensor, tensor_type: int, *, num_threads: int | None = None
) -> Tensor:
    """Quantize a matrix to the blocks that a GGUF file would hold.

    :param weight: [rows, cols] float32, bfloat16 or float16; rows contiguous
    :param tensor_type: ggml's number of the type, one of :data:`PACKED_TYPES`
    :param num_threads: torch's own number by default
    :returns: uint8 [rows, bytes of a row]; the result does not depend on the number of threads
    :raises UnsupportedQuantizationError: the type cannot be written, or ``cols`` is no multiple of its block
    :raises CheckpointError: ``weight`` holds NaN, Inf or numbers above 32,768
    :raises ConfigError: the dtype or the strides do not fit
    """
    if weight.dim() != 2:
        raise ConfigError.of("weight.shape", tuple(weight.shape), "[rows, cols]")
    rows, cols = weight.shape
    check_matrix("weight", weight, (rows, cols), tuple(WEIGHT_DTYPES))
    form = _format_for(tensor_type, cols)
    out = torch.empty(rows, cols // form.elements * form.num_bytes, dtype=torch.uint8)
    args = Quantize(
        x=weight.data_ptr(),
        out=out.data_ptr(),
        x_stride=weight.stride(0),
        format=tensor_type,
        rows=rows,
        cols=cols,
        dtype=WEIGHT_DTYPES[weight.dtype],
        num_threads=torch.get_num_threads() if num_threads is None else num_threads,
    )
    if library.functions.paged_quantize(library.level, byref(args)) == _NOT_FINITE:
        raise CheckpointError("a weight cannot be quantized: it holds NaN, Inf or numbers above 32,768")
    return out


def _format_for(tensor_type: int, cols: int) -> BlockFormat:
    fitting = {number: BLOCK_FORMATS[number] for number in sorted(PACKED_TYPES)}
    fitting = {number: form for number, form in fitting.items() if cols % form.elements == 0}
    if tensor_type in fitting:
        return fitting[tensor_type]
    supported = tuple(form.name for form in fitting.values())
    known = BLOCK_FORMATS.get(tensor_type)
    name = f"GGUF tensor type {tensor_type}" if known is None else known.name
    raise UnsupportedQuantizationError(
        f"a weight of {cols} columns cannot be quantized to {name}: possible are {', '.join(supported) or 'none'}",
        quantization=name,
        supported=supported,
    )

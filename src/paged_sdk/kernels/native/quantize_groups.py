"""Quantizes dense weights to grouped matrices with the native library: the in-situ types with a scale per 64 columns.

:mod:`paged_sdk.kernels.quantized.quantize_groups` defines them. It sums in another order, so that occasionally a code
or the last bit of a scale differs.
"""

from __future__ import annotations

from ctypes import byref
from typing import Final

import torch
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.linear import check_matrix
from paged_sdk.kernels.native.structures import WEIGHT_DTYPES
from paged_sdk.kernels.native.structures_packing import QuantizeGroups
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix
from paged_sdk.kernels.quantized.quantize import not_finite
from paged_sdk.kernels.quantized.quantize_groups import GROUP, between_levels

__all__ = ["quantize_affine", "quantize_half_quadratic", "quantize_levels"]

_NOT_FINITE: Final = 2
_WIDTH: Final = 32  # the last group of a row has this number of columns or twice as many

_EDGE: Final = 0
_HALF_QUADRATIC: Final = 1
_LEVELS: Final = 2


def quantize_affine(
    library: NativeLibrary, weight: Tensor, bits: int, *, num_threads: int | None = None
) -> GroupedMatrix:
    """See :func:`paged_sdk.kernels.quantized.quantize_groups.quantize_affine`.

    :param weight: ``[rows, cols]`` float32, bfloat16 or float16; rows contiguous, ``cols`` a multiple of 32
    :param num_threads: torch's own number by default; the result does not depend on it
    :raises CheckpointError: ``weight`` has NaN, Inf or magnitudes above 32,768
    :raises ConfigError: the shape, the dtype or the strides do not fit
    """
    return _quantize(library, weight, bits, _EDGE, num_threads=num_threads)


def quantize_half_quadratic(
    library: NativeLibrary, weight: Tensor, bits: int, *, num_threads: int | None = None
) -> GroupedMatrix:
    """See :func:`paged_sdk.kernels.quantized.quantize_groups.quantize_half_quadratic`, and :func:`quantize_affine` for
    the parameters and errors.
    """
    return _quantize(library, weight, bits, _HALF_QUADRATIC, num_threads=num_threads)


def quantize_levels(
    library: NativeLibrary, weight: Tensor, levels: tuple[float, ...], *, num_threads: int | None = None
) -> GroupedMatrix:
    """See :func:`paged_sdk.kernels.quantized.quantize_groups.quantize_levels`, and :func:`quantize_affine` for the
    parameters and errors.
    """
    return _quantize(
        library, weight, 4, _LEVELS, levels=torch.tensor(levels, dtype=torch.float32), num_threads=num_threads
    )


def _quantize(
    library: NativeLibrary,
    weight: Tensor,
    bits: int,
    fit: int,
    *,
    levels: Tensor | None = None,
    num_threads: int | None,
) -> GroupedMatrix:
    if weight.dim() != 2 or weight.shape[1] % _WIDTH:
        raise ConfigError.of("weight.shape", tuple(weight.shape), f"[rows, a multiple of {_WIDTH}]")
    rows, cols = weight.shape
    check_matrix("weight", weight, (rows, cols), tuple(WEIGHT_DTYPES))
    codes = torch.empty(rows, cols, dtype=torch.uint8)
    scales = torch.empty(rows, -(-cols // GROUP), dtype=torch.float32)
    minima = torch.empty_like(scales) if levels is None else None
    between, numbers = (None, None) if levels is None else between_levels(levels)
    args = QuantizeGroups(
        x=weight.data_ptr(),
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        minima=None if minima is None else minima.data_ptr(),
        between=None if between is None else between.data_ptr(),
        numbers=None if numbers is None else numbers.data_ptr(),
        x_stride=weight.stride(0),
        fit=fit,
        bits=bits,
        rows=rows,
        cols=cols,
        dtype=WEIGHT_DTYPES[weight.dtype],
        num_threads=torch.get_num_threads() if num_threads is None else num_threads,
    )
    if library.functions.paged_quantize_groups(library.level, byref(args)) == _NOT_FINITE:
        raise not_finite()
    return GroupedMatrix(codes=codes, scales=scales, minima=minima, group_size=GROUP, levels=levels, bits=bits)

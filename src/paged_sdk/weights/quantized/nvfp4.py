"""Read NVFP4, which two formats use: FP4 (E2M1) values, an FP8 scale per 16 values, and one factor per matrix."""

from __future__ import annotations

from typing import Final

import torch

from paged_sdk.kernels.quantized.packed_codes import CodeForm
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.weights.quantized.format import PackedMatrix
from paged_sdk.weights.quantized.grouped_reading import e2m1_levels, grouped_rows
from paged_sdk.weights.quantized.packed_tensors import PackedTensors

__all__ = ["nvfp4_matrix"]

_GROUP: Final = 16


def nvfp4_matrix(tensors: PackedTensors, codes: str, scales: str, factor: str, *, divides: bool) -> PackedMatrix:
    """Check the tensors of a matrix, and return it.

    :param codes: the suffix of the codes, uint8 ``[rows, cols / 2]``
    :param scales: the suffix of the scales, float8 ``[rows, cols / 16]``
    :param factor: the suffix of the factor, one float32 number
    :param divides: whether scales are divided by the factor instead of multiplied
    :raises CheckpointError: a tensor is missing, or does not fit the others
    """
    tensors.check(codes, (torch.uint8,))
    rows, num_bytes = tensors.shape(codes, 2)
    cols = num_bytes * 2
    if cols % _GROUP:
        raise tensors.error(codes, f"has {cols} numbers in a row: expected a multiple of {_GROUP}")
    tensors.check(scales, (torch.float8_e4m3fn,), (rows, cols // _GROUP))
    tensors.check(factor, (torch.float32,), (), (1,))

    def stored() -> StoredMatrix:
        of_all = tensors.floats(factor).reshape(())
        of_groups = tensors.tensor(scales, (torch.float8_e4m3fn,)).float()
        return grouped_rows(
            tensors.rows(codes),
            CodeForm.STREAM,
            cols,
            of_groups / of_all if divides else of_groups * of_all,
            bits=4,
            group_size=_GROUP,
            levels=e2m1_levels(),
        )

    return PackedMatrix((rows, cols), stored)

"""Read FP8 matrices with scales, which several formats use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from paged_sdk.kernels.quantized.packed_codes import CodeForm
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.weights.quantized.format import PackedMatrix
from paged_sdk.weights.quantized.grouped_reading import find_grid, grouped_rows
from paged_sdk.weights.quantized.packed_tensors import FLOATS, PackedTensors

__all__ = ["FLOAT8", "float8_levels", "float8_matrix"]

FLOAT8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)


def float8_matrix(
    tensors: PackedTensors, codes: str, scales: str, blocks: Iterable[tuple[int, int]] = ()
) -> PackedMatrix:
    """Check the tensors of a matrix, and return it.

    :param codes: the suffix of the values, float8 ``[rows, cols]``
    :param scales: the suffix of the scales: one per matrix, per row, or per block
    :param blocks: the possible block shapes (rows, columns)
    :raises CheckpointError: a tensor is missing, or does not fit the other
    """
    tensors.check(codes, FLOAT8)
    rows, cols = tensors.shape(codes, 2)
    grid = find_grid(tensors, scales, FLOATS, (rows, cols), blocks)

    def stored() -> StoredMatrix:
        return grouped_rows(
            tensors.rows(codes),
            CodeForm.STREAM,
            cols,
            grid.spread(tensors.floats(scales)),
            bits=8,
            group_size=grid.cols,
            levels=float8_levels(tensors.dtype(codes)),
        )

    return PackedMatrix((rows, cols), stored)


def float8_levels(dtype: torch.dtype) -> torch.Tensor:
    """Return the values of all 256 codes of an FP8 type, float32."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()

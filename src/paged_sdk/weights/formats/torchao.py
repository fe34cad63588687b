"""Read torchao's safetensors: int8 and FP8, and integers of fewer bits, one per byte.

A matrix ``NAME.weight`` is stored as ``NAME._weight_qdata``, with ``_weight_scale`` per matrix, per row or per block,
and optionally ``_weight_zero_point``. The dtypes tell which of torchao's tensor classes it was; classes that pack codes
for a specific kernel are refused.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Final

import torch
from attrs import frozen

from paged_sdk.kernels.quantized.packed_codes import CodeForm
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.weights.quantized.float8 import FLOAT8, float8_matrix
from paged_sdk.weights.quantized.format import PackedMatrix, QuantizedFormat
from paged_sdk.weights.quantized.grouped_reading import ScaleGrid, find_grid, grouped_rows
from paged_sdk.weights.quantized.packed_tensors import FLOATS, PackedTensors

__all__ = ["FORMAT"]

_PREFIX: Final = "._weight_"
_CODES, _SCALE, _ZERO = "qdata", "scale", "zero_point"
_ZEROS: Final = (torch.int8, torch.int16, torch.int32, torch.int64, *FLOATS)


@frozen
class _Torchao(QuantizedFormat):
    methods: ClassVar[tuple[str, ...]] = ("torchao",)

    def packs(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        module, mark, part = name.rpartition(_PREFIX)
        return (module + mark, f"{module}.weight") if mark and part == _CODES else None

    def owner(self, name: str) -> str | None:
        module, mark, part = name.rpartition(_PREFIX)
        return module + mark if mark and part != _CODES else None

    def matrix(self, tensors: PackedTensors) -> PackedMatrix:
        tensors.check(_CODES, (torch.int8, *FLOAT8))
        if "act_pre_scale" in tensors:
            raise tensors.error("act_pre_scale", "scales activations, which is not supported")
        rows, cols = tensors.shape(_CODES, 2)
        blocks = []
        scales = tensors.source.shape(tensors.prefix + _SCALE) if _SCALE in tensors else ()
        if len(scales) == 2 and min(rows, cols, *scales) > 0 and rows % scales[0] == 0 and cols % scales[1] == 0:
            blocks.append((rows // scales[0], cols // scales[1]))
        if tensors.dtype(_CODES) is not torch.int8:
            return float8_matrix(tensors, _CODES, _SCALE, blocks)
        grid = find_grid(tensors, _SCALE, FLOATS, (rows, cols), blocks)
        if _ZERO in tensors:
            tensors.check(_ZERO, _ZEROS, tensors.source.shape(tensors.prefix + _SCALE))
        return PackedMatrix((rows, cols), partial(_integers, tensors, grid))


def _integers(tensors: PackedTensors, grid: ScaleGrid) -> StoredMatrix:
    scales = grid.spread(tensors.floats(_SCALE))
    zeros = grid.spread(tensors.tensor(_ZERO, _ZEROS)) if _ZERO in tensors else torch.zeros((), dtype=torch.float32)
    return grouped_rows(
        tensors.rows(_CODES),
        CodeForm.SIGNED,
        grid.shape[1],
        scales,
        bits=8,
        group_size=grid.cols,
        minima=-scales * (zeros + 128),
    )


FORMAT: Final = _Torchao

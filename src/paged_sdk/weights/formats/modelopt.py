"""Read the formats of NVIDIA's Model Optimizer: FP8 with one scale per matrix, and NVFP4.

NVFP4 has ``weight`` uint8 ``[out, in / 2]``, two FP4 values per byte, the first in the low half; ``weight_scale``
float8 ``[out, in / 16]``, a scale per 16 values; and ``weight_scale_2``, one more factor for the matrix. Scales of
activations and of the KV cache are ignored.
"""

from __future__ import annotations

from typing import ClassVar, Final, Self

import torch
from attrs import frozen

from paged_sdk.weights.quantized.float8 import float8_matrix
from paged_sdk.weights.quantized.format import PackedMatrix, QuantizedFormat, without
from paged_sdk.weights.quantized.nvfp4 import nvfp4_matrix
from paged_sdk.weights.quantized.packed_tensors import PackedTensors
from paged_sdk.weights.quantized.settings import FormatSettings

__all__ = ["FORMAT"]

_FP8, _NVFP4 = "FP8", "NVFP4"


@frozen
class _ModelOpt(QuantizedFormat):
    methods: ClassVar[tuple[str, ...]] = ("modelopt", "modelopt_fp4")

    @classmethod
    def open(cls, settings: FormatSettings) -> Self:
        settings.one_of("quant_algo", (_FP8, _NVFP4))
        return cls()

    def packs(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        prefix = without(name, ".weight")
        return (prefix, name) if prefix is not None and dtype in (torch.uint8, torch.float8_e4m3fn) else None

    def owner(self, name: str) -> str | None:
        return without(name, ".weight_scale", ".weight_scale_2", ".pre_quant_scale")

    def matrix(self, tensors: PackedTensors) -> PackedMatrix:
        if ".pre_quant_scale" in tensors:
            raise tensors.error(".pre_quant_scale", "scales activations, which is not supported")
        if tensors.dtype(".weight") is torch.uint8:
            return nvfp4_matrix(tensors, ".weight", ".weight_scale", ".weight_scale_2", divides=False)
        return float8_matrix(tensors, ".weight", ".weight_scale")


FORMAT: Final = _ModelOpt

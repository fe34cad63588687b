"""Read MXFP4, the format of gpt-oss's experts: FP4 (E2M1) values with a power-of-two scale per 32 values.

``NAME_blocks`` uint8 ``[experts, out, in / 32, 16]`` has two codes per byte, the first in the low half;
``NAME_scales`` uint8 ``[experts, out, in / 32]`` has the exponents. Without experts, the first dimension is missing.
"""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, Final

import torch
from attrs import frozen

from paged_sdk.kernels.quantized.packed_codes import CodeForm
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.weights.quantized.format import PackedMatrix, QuantizedFormat, without
from paged_sdk.weights.quantized.grouped_reading import E8M0, e2m1_levels, grouped_rows, powers_of_two
from paged_sdk.weights.quantized.packed_tensors import PackedTensors

__all__ = ["FORMAT"]

_BLOCK: Final = 32
_BYTES: Final = 16


@frozen
class _Mxfp4(QuantizedFormat):
    methods: ClassVar[tuple[str, ...]] = ("mxfp4",)

    def packs(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        prefix = without(name, "_blocks")
        return None if prefix is None else (prefix, prefix)

    def owner(self, name: str) -> str | None:
        return without(name, "_scales")

    def matrix(self, tensors: PackedTensors) -> PackedMatrix:
        tensors.check("_blocks", (torch.uint8,))
        shape = tensors.source.shape(f"{tensors.prefix}_blocks")
        if len(shape) not in (3, 4) or shape[-1] != _BYTES:
            raise tensors.error("_blocks", f"has shape {list(shape)}: expected blocks of {_BYTES} bytes")
        *outputs, blocks, _ = shape
        tensors.check("_scales", E8M0, (*outputs, blocks))
        return PackedMatrix((*outputs, blocks * _BLOCK), partial(_stored, tensors, math.prod(outputs), blocks))


def _stored(tensors: PackedTensors, rows: int, blocks: int) -> StoredMatrix:
    return grouped_rows(
        tensors.unread_bytes("_blocks", rows, blocks * _BYTES),
        CodeForm.STREAM,
        blocks * _BLOCK,
        powers_of_two(tensors.tensor("_scales", E8M0)).view(rows, blocks),
        bits=4,
        group_size=_BLOCK,
        levels=e2m1_levels(),
    )


FORMAT: Final = _Mxfp4

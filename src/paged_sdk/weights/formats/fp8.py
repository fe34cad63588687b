"""Read FP8 weights with scales per block (DeepSeek, Qwen), per row (FBGEMM) or per matrix.

The scale of ``weight`` is ``weight_scale_inv``, which is a multiplier despite its name, or ``weight_scale``. For
stacked experts, ``_scale_inv`` is appended to the tensor's name. Scales of activations are ignored: activations are not
quantized here.
"""

from __future__ import annotations

from typing import ClassVar, Final, Self

import torch
from attrs import frozen

from paged_sdk.kernels.quantized.packed_codes import CodeForm
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.weights.quantized.float8 import FLOAT8, float8_levels, float8_matrix
from paged_sdk.weights.quantized.format import PackedMatrix, QuantizedFormat, without
from paged_sdk.weights.quantized.grouped_reading import grouped_rows
from paged_sdk.weights.quantized.packed_tensors import FLOATS, PackedTensors
from paged_sdk.weights.quantized.settings import FormatSettings

__all__ = ["FORMAT"]

_SCALES: Final = ("_scale_inv", "_scale")


@frozen
class _Fp8(QuantizedFormat):
    """Reads the format with a checkpoint's settings.

    :ivar block: the rows and columns that share a scale, if there is a scale per block
    """

    methods: ClassVar[tuple[str, ...]] = ("fp8", "fbgemm_fp8")

    block: tuple[int, int]

    @classmethod
    def open(cls, settings: FormatSettings) -> Self:
        return cls(settings.block("weight_block_size", (128, 128)))

    def packs(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        return (name, name) if dtype in FLOAT8 else None

    def owner(self, name: str) -> str | None:
        scaled = without(name, "_scale_inv")
        return without(name, "_scale") if name.endswith(".weight_scale") else scaled

    def matrix(self, tensors: PackedTensors) -> PackedMatrix:
        suffix = next((each for each in _SCALES if each in tensors), _SCALES[0])
        shape = tensors.source.shape(tensors.prefix)
        if len(shape) == 3:
            return self._stack(tensors, suffix, shape)
        return float8_matrix(tensors, "", suffix, [self.block])

    def _stack(self, tensors: PackedTensors, suffix: str, shape: tuple[int, ...]) -> PackedMatrix:
        """Return the experts' matrices stacked vertically; blocks do not cross experts."""
        count, rows, cols = shape
        high, wide = self.block
        blocks = (count, -(-rows // high), -(-cols // wide))
        tensors.check(suffix, FLOATS, blocks)

        def stored() -> StoredMatrix:
            scales = tensors.floats(suffix).repeat_interleave(high, 1)[:, :rows].reshape(count * rows, blocks[2])
            return grouped_rows(
                tensors.rows(""),
                CodeForm.STREAM,
                cols,
                scales,
                bits=8,
                group_size=wide,
                levels=float8_levels(tensors.dtype("")),
            )

        return PackedMatrix(shape, stored)


FORMAT: Final = _Fp8

"""Read MLX's affine weights (AFQ), and the like that transformers writes for Metal.

``weight`` uint32 ``[out, in * bits / 32]`` has a row's codes as one bit stream; a weight is ``code * scale + bias``,
with ``scales`` and ``biases`` ``[out, groups]``. MLX's section of the config has no ``quant_method``, and may have
separate settings for some modules, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Final, Self

import torch
from attrs import frozen

from paged_sdk.kernels.quantized.packed_codes import CodeForm
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.weights.quantized.format import PackedMatrix, QuantizedFormat, without
from paged_sdk.weights.quantized.grouped_reading import grouped_rows
from paged_sdk.weights.quantized.packed_tensors import FLOATS, PackedTensors
from paged_sdk.weights.quantized.settings import FormatSettings

__all__ = ["FORMAT"]

_BITS: Final = (2, 3, 4, 5, 6, 8)
_METAL: Final = "metal"


@frozen
class _Affine:
    """Holds the settings of a group of modules."""

    bits: int
    group_size: int

    @classmethod
    def of(cls, settings: FormatSettings) -> _Affine:
        """Read the settings from a section of the config.

        :raises UnsupportedQuantizationError: the mode is not affine, or the bits are not supported
        :raises CheckpointError: a setting is malformed
        """
        settings.one_of("mode", ("affine",), "affine")
        return cls(settings.bits("bits", _BITS), settings.positive("group_size"))


@frozen
class _Mlx(QuantizedFormat):
    """Reads the format with a checkpoint's settings.

    :ivar usual: the default settings
    :ivar by_name: the settings of modules that the config names
    :ivar minima: the suffix of the tensors of biases
    """

    methods: ClassVar[tuple[str, ...]] = ("mlx", _METAL)

    usual: _Affine
    by_name: Mapping[str, _Affine]
    minima: str

    @classmethod
    def is_of(cls, settings: FormatSettings) -> bool:
        if "quant_method" in settings:
            return settings.method == _METAL
        return "bits" in settings and "group_size" in settings

    @classmethod
    def open(cls, settings: FormatSettings) -> Self:
        by_name = {name: _Affine.of(each) for name, each in settings.sections().items() if "bits" in each}
        return cls(_Affine.of(settings), by_name, ".qbiases" if settings.method == _METAL else ".biases")

    def packs(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        prefix = without(name, ".weight")
        return (prefix, name) if prefix is not None and dtype is torch.uint32 else None

    def owner(self, name: str) -> str | None:
        return without(name, ".scales", self.minima)

    def matrix(self, tensors: PackedTensors) -> PackedMatrix:
        settings = self.by_name.get(tensors.prefix, self.usual)
        rows, words = tensors.shape(".weight", 2)
        cols = words * 32 // settings.bits
        if words * 32 % settings.bits or cols % settings.group_size:
            raise tensors.error(
                ".weight",
                f"has {words} words in a row: expected whole groups of {settings.group_size} codes of "
                f"{settings.bits} bits",
            )
        for suffix in (".scales", self.minima):
            tensors.check(suffix, FLOATS, (rows, cols // settings.group_size))
        return PackedMatrix((rows, cols), partial(self._stored, tensors, settings, cols))

    def _stored(self, tensors: PackedTensors, settings: _Affine, cols: int) -> StoredMatrix:
        return grouped_rows(
            tensors.rows(".weight"),
            CodeForm.STREAM,
            cols,
            tensors.floats(".scales"),
            bits=settings.bits,
            group_size=settings.group_size,
            minima=tensors.floats(self.minima),
        )


FORMAT: Final = _Mlx

"""Read MLX's affine weights (AFQ), and what transformers writes of the same kind for Metal.

``weight`` uint32 ``[out, in * bits / 32]`` has a row's codes as one stream of bits; a weight is its code times one of
``scales`` plus one of ``biases``, both ``[out, groups]``. The config's section has no ``quant_method``, and may have
settings of their own for some modules, by name.
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
    """Holds the settings of some modules."""

    bits: int
    group_size: int

    @classmethod
    def of(cls, settings: FormatSettings) -> _Affine:
        """Read a section.

        :raises UnsupportedQuantizationError: it is not affine
        """
        settings.one_of("mode", ("affine",), "affine")
        return cls(settings.bits("bits", _BITS), settings.positive("group_size"))


@frozen
class _Mlx(QuantizedFormat):
    """Reads one checkpoint.

    :ivar usual: what holds for modules that are not named
    :ivar by_name: the settings of those that are
    :ivar minima: what the names of minima end in
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

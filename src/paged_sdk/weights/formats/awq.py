"""Read AWQ, in AutoAWQ's "gemm" layout.

``qweight`` int32 ``[in, out / 8]`` packs the 4-bit codes of 8 outputs in a word, ``qzeros`` ``[groups, out / 8]`` packs
their zero points likewise, and ``scales`` is ``[groups, out]``.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Final, Self

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix, UnreadGroupedMatrix
from paged_sdk.kernels.quantized.packed_codes import CodeForm, PackedCodes
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.weights.quantized.format import PackedMatrix, QuantizedFormat, without
from paged_sdk.weights.quantized.packed_tensors import FLOATS, PackedTensors
from paged_sdk.weights.quantized.settings import FormatSettings

__all__ = ["FORMAT"]

_BITS: Final = 4
_PER_WORD: Final = 32 // _BITS


@frozen
class _Awq(QuantizedFormat):
    """Reads the format with a checkpoint's settings.

    :ivar group_size: how many input columns share a scale; -1: all
    """

    methods: ClassVar[tuple[str, ...]] = ("awq",)

    group_size: int

    @classmethod
    def open(cls, settings: FormatSettings) -> Self:
        key = "version" if "version" in settings else "format"
        if settings.text(key, "gemm").lower() != "gemm":
            raise settings.unsupported(key, ("gemm",))
        settings.bits("w_bit" if "w_bit" in settings else "bits", (_BITS,))
        if not settings.flag("zero_point", True):
            raise settings.unsupported("zero_point", ("true",))
        key = "q_group_size" if "q_group_size" in settings else "group_size"
        return cls(settings.group_size(key, 128))

    def packs(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        prefix = without(name, ".qweight")
        return None if prefix is None else (prefix, f"{prefix}.weight")

    def owner(self, name: str) -> str | None:
        return without(name, ".qzeros", ".scales")

    def matrix(self, tensors: PackedTensors) -> PackedMatrix:
        tensors.check(".qweight", (torch.int32,))
        cols, words = tensors.shape(".qweight", 2)
        rows = words * _PER_WORD
        group_size = max(1, cols) if self.group_size == -1 else self.group_size
        groups = cols // group_size
        if cols % group_size:
            raise tensors.error(".qweight", f"has {cols} rows: expected a multiple of the {group_size} of a group")
        tensors.check(".scales", FLOATS, (groups, rows))
        tensors.check(".qzeros", (torch.int32,), (groups, words))
        return PackedMatrix((rows, cols), partial(_stored, tensors, (rows, cols), groups, group_size))


def _stored(tensors: PackedTensors, shape: tuple[int, int], groups: int, group_size: int) -> StoredMatrix:
    scales = tensors.floats(".scales", (groups, shape[0])).t().contiguous()
    minima = -scales * _codes(tensors.tensor(".qzeros", (torch.int32,))).bytes()
    words = tensors.later(".qweight")

    def read(first: int, last: int) -> GroupedMatrix:
        return GroupedMatrix(
            codes=_codes(words.value).rows(slice(first, last)),
            scales=scales[first:last],
            minima=minima[first:last],
            group_size=group_size,
            bits=_BITS,
        )

    return UnreadGroupedMatrix(shape=shape, read=read, group_size=group_size, has_minima=True, bits=_BITS)


def _codes(words: Tensor) -> PackedCodes:
    """Return the codes ``[words * 8, columns]`` of words ``[columns, words]``."""
    cols, count = words.shape
    return PackedCodes(words=words, form=CodeForm.OF_EIGHT_ROWS, shape=(count * _PER_WORD, cols), bits=_BITS)


FORMAT: Final = _Awq

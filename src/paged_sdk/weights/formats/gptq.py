"""Read GPTQ, as AutoGPTQ and its successors write it: 2, 3, 4 and 8 bits, with columns grouped in any order.

``qweight`` int32 ``[in * bits / 32, out]`` has an output's codes in one column; ``scales`` ``[groups, out]`` and
``qzeros`` ``[groups, out * bits / 32]`` are per group of input columns; ``g_idx`` ``[in]`` is the group of each column.
With ``desc_act``, columns were quantized in the order of their activations, so groups are not contiguous. Version 1 of
the format stores zero points minus 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final, Self

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix, UnreadGroupedMatrix
from paged_sdk.kernels.quantized.packed_codes import CodeForm, PackedCodes, unpacked
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix, UnreadRows
from paged_sdk.weights.quantized.format import PackedMatrix, QuantizedFormat, without
from paged_sdk.weights.quantized.grouped_reading import groups_of_columns, order_of_columns
from paged_sdk.weights.quantized.packed_tensors import FLOATS, PackedTensors
from paged_sdk.weights.quantized.settings import FormatSettings

__all__ = ["FORMAT"]

_BITS: Final = (2, 3, 4, 8)
_V1, _V2 = "gptq", "gptq_v2"


@frozen
class _Gptq(QuantizedFormat):
    """Reads the format with a checkpoint's settings.

    :ivar bits: the possible bits of a matrix: several if the config has exceptions for some modules
    :ivar group_sizes: the possible group sizes; -1: a row is one group
    :ivar is_v1: whether zero points are stored minus 1
    """

    methods: ClassVar[tuple[str, ...]] = ("gptq",)

    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]
    is_v1: bool

    @classmethod
    def open(cls, settings: FormatSettings) -> Self:
        key = "checkpoint_format" if "checkpoint_format" in settings else "format"
        version = settings.one_of(key, (_V1, _V2), _V1)
        # GPTQModel's exceptions are settings by regular expression of a module's name. The expressions are untrusted
        # and not evaluated: a matrix's tensors determine its settings.
        exceptions = settings.section("dynamic").sections().values()
        bits = [settings.bits("bits", _BITS)]
        bits += [each.bits("bits", _BITS) for each in exceptions if "bits" in each]
        sizes = [settings.group_size("group_size", 128)]
        sizes += [each.group_size("group_size") for each in exceptions if "group_size" in each]
        return cls(tuple(dict.fromkeys(bits)), tuple(dict.fromkeys(sizes)), version == _V1)

    def packs(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        prefix = without(name, ".qweight")
        return None if prefix is None else (prefix, f"{prefix}.weight")

    def owner(self, name: str) -> str | None:
        return without(name, ".qzeros", ".scales", ".g_idx")

    def matrix(self, tensors: PackedTensors) -> PackedMatrix:
        tensors.check(".qweight", (torch.int32,))
        words, rows = tensors.shape(".qweight", 2)
        groups, _ = tensors.shape(".scales", 2)
        named_cols = tensors.shape(".g_idx", 1)[0] if ".g_idx" in tensors else None
        found = [
            (bits, cols, size)
            for bits in self.bits
            for size in self.group_sizes
            for cols in (words * 32 // bits,)
            if cols == (cols if named_cols is None else named_cols)
            and words * 32 == cols * bits
            and groups == (1 if size == -1 else -(-cols // size))
        ]
        if not found:
            raise tensors.error(
                ".qweight",
                f"of shape {[words, rows]}, beside {groups} groups of scales"
                f"{'' if named_cols is None else f' for {named_cols} columns'}, does not have codes of "
                f"{_either(self.bits)} bits in groups of {_either(self.group_sizes)} columns, as the config says",
            )
        bits, cols, size = found[0]
        tensors.check(".scales", FLOATS, (groups, rows))
        tensors.check(".qzeros", (torch.int32,), (groups, -(-rows * bits // 32)))
        return PackedMatrix(
            (rows, cols), partial(self._stored, tensors, (rows, cols), bits, max(1, cols) if size == -1 else size)
        )

    def _stored(self, tensors: PackedTensors, shape: tuple[int, int], bits: int, group_size: int) -> StoredMatrix:
        rows, cols = shape
        groups = -(-cols // group_size)
        scales = tensors.floats(".scales", (groups, rows)).t().contiguous()
        zeros = self._zeros(tensors.tensor(".qzeros", (torch.int32,)), bits)[:, :rows].t()
        minima = -scales * zeros
        words = tensors.later(".qweight")
        order: Tensor | None = None
        if ".g_idx" in tensors:
            named = groups_of_columns(tensors, ".g_idx", cols, groups)
            order, is_even = order_of_columns(named, group_size)
            if not is_even:
                return _decoded(shape, bits, lambda: words.value, scales[:, named], minima[:, named])

        def read(first: int, last: int) -> GroupedMatrix:
            own = words.value[:, first:last]
            codes = PackedCodes(words=own, form=CodeForm.COLUMNS, shape=(last - first, cols), bits=bits)
            return GroupedMatrix(
                codes=codes if order is None else codes.bytes()[:, order],
                scales=scales[first:last],
                minima=minima[first:last],
                group_size=group_size,
                order=order,
                bits=bits,
            )

        return UnreadGroupedMatrix(
            shape=shape, read=read, group_size=group_size, has_minima=True, bits=bits, order=order
        )

    def _zeros(self, words: Tensor, bits: int) -> Tensor:
        """Return zero points, float32 ``[groups, outputs]``."""
        if not self.is_v1:
            return unpacked(words, bits).float()
        if 32 % bits:
            return unpacked(words, bits).float() + 1
        # Writers subtract 1 from all codes of a word at once, so that a zero point of 0 borrows from the next code.
        return unpacked(words + sum(1 << shift for shift in range(0, 31, bits)), bits).float()


def _decoded(
    shape: tuple[int, int], bits: int, words: Callable[[], Tensor], scales: Tensor, minima: Tensor
) -> DenseMatrix:
    """Return the decoded matrix, for groups of uneven size.

    :param scales: the scale of each element; ``minima`` likewise
    """

    def read(first: int, last: int) -> Tensor:
        codes = unpacked(words()[:, first:last].t(), bits)
        return codes * scales[first:last] + minima[first:last]

    return DenseMatrix(UnreadRows(shape=shape, itemsize=4, read=read))


def _either(numbers: tuple[int, ...]) -> str:
    return " or ".join("all" if each == -1 else str(each) for each in numbers)


FORMAT: Final = _Gptq

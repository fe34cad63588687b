"""Read bitsandbytes: 4-bit codes of a table (NF4, FP4) with 8- or 32-bit scales, and int8.

4 bits: ``weight``, of any dtype, has the codes of the matrix in row-major order, two per byte, the first in the high
half; ``weight.quant_map`` is the table, and ``weight.absmax`` has a scale per block of codes. With double quantization,
``absmax`` has codes of ``weight.nested_quant_map``, themselves scaled by ``weight.nested_absmax``.

8 bits: ``weight`` is int8, and ``SCB`` has the largest absolute value of each row.
"""

from __future__ import annotations

import json
from functools import partial
from typing import ClassVar, Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.quantized.packed_codes import CodeForm, PackedCodes
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix, UnreadRows
from paged_sdk.weights.quantized.format import PackedMatrix, QuantizedFormat, without
from paged_sdk.weights.quantized.grouped_reading import grouped_rows
from paged_sdk.weights.quantized.packed_tensors import PackedTensors

__all__ = ["FORMAT"]

_STATES: Final = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_ABSMAX, _MAP, _NESTED_ABSMAX, _NESTED_MAP = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
_LONGEST_STATE: Final = 1 << 16


@frozen
class _State:
    """Holds the settings of a 4-bit matrix.

    :ivar shape: rows and columns of the matrix
    :ivar block: how many codes share a scale
    :ivar nested_block: how many quantized scales share a nested scale; None: scales are float32
    :ivar nested_offset: the constant to add to quantized scales
    """

    shape: tuple[int, int]
    block: int
    nested_block: int | None
    nested_offset: float

    @classmethod
    def of(cls, tensors: PackedTensors, suffix: str) -> _State:
        """Read the settings from the JSON in a tensor's bytes.

        :raises CheckpointError: the JSON is malformed or has invalid values
        """
        if sum(tensors.shape(suffix, 1)) > _LONGEST_STATE:
            raise tensors.error(suffix, f"has more than {_LONGEST_STATE} bytes")
        data = tensors.tensor(suffix, (torch.uint8,))
        try:
            found = json.loads(bytes(data.tolist()))
        except (ValueError, RecursionError) as error:
            raise tensors.error(suffix, "is not JSON") from error
        limit = 2**31
        match found:
            case {"blocksize": int(block), "shape": [int(rows), int(cols)]} if (
                1 < block < limit and block % 2 == 0 and 0 < rows < limit and 0 < cols < limit
            ):
                pass
            case _:
                raise tensors.error(suffix, "does not describe blocks of a matrix")
        match found:
            case {"nested_blocksize": int(nested), "nested_offset": int(offset) | float(offset)} if 0 < nested < limit:
                return cls((rows, cols), block, nested, float(min(max(offset, -1e30), 1e30)))
            case {"nested_blocksize": _} | {"nested_offset": _}:
                raise tensors.error(suffix, "does not describe scales that are quantized")
        return cls((rows, cols), block, None, 0.0)


@frozen
class _Bitsandbytes(QuantizedFormat):
    methods: ClassVar[tuple[str, ...]] = ("bitsandbytes",)

    def packs(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        weight = without(name, *_STATES)
        if weight is not None:
            return weight, weight
        prefix = without(name, ".SCB")
        return None if prefix is None else (prefix, f"{prefix}.weight")

    def owner(self, name: str) -> str | None:
        return without(name, _ABSMAX, _MAP, _NESTED_ABSMAX, _NESTED_MAP, ".weight_format")

    def matrix(self, tensors: PackedTensors) -> PackedMatrix:
        if ".SCB" in tensors:
            return _int8(tensors)
        suffix = next(each for each in _STATES if each in tensors)
        state = _State.of(tensors, suffix)
        rows, cols = state.shape
        codes = tensors.unread_bytes("", -(-rows * cols // 2), 1)
        blocks = -(-rows * cols // state.block)
        tensors.check(_MAP, (torch.float32,), (16,))
        if state.nested_block is None:
            tensors.check(_ABSMAX, (torch.float32,), (blocks,))
        else:
            tensors.check(_ABSMAX, (torch.uint8,), (blocks,))
            tensors.check(_NESTED_ABSMAX, (torch.float32,), (-(-blocks // state.nested_block),))
            tensors.check(_NESTED_MAP, (torch.float32,), (256,))
        return PackedMatrix(state.shape, partial(_stored, tensors, state, codes))


def _stored(tensors: PackedTensors, state: _State, codes: UnreadRows) -> StoredMatrix:
    rows, cols = state.shape
    scales = tensors.tensor(_ABSMAX, (torch.float32, torch.uint8))
    if state.nested_block is not None:
        in_turn = tensors.floats(_NESTED_ABSMAX).repeat_interleave(state.nested_block)[: len(scales)]
        scales = tensors.floats(_NESTED_MAP)[scales.int()] * in_turn + state.nested_offset
    levels = tensors.floats(_MAP)
    if cols % state.block == 0:
        return grouped_rows(
            tensors.unread_bytes("", rows, cols // 2),
            CodeForm.HIGH_FIRST,
            cols,
            scales.view(rows, cols // state.block),
            bits=4,
            group_size=state.block,
            levels=levels,
        )

    def read(first: int, last: int) -> Tensor:  # blocks cross row boundaries
        begin, end = first * cols, last * cols
        words = codes[begin // 2 : -(-end // 2)].tensor().view(1, -1)
        in_row = PackedCodes(words=words, form=CodeForm.HIGH_FIRST, shape=(1, 2 * words.numel()), bits=4)
        numbers = levels[in_row.bytes()[0].int()]
        part = numbers[begin % 2 : begin % 2 + end - begin]
        return (part * scales[torch.arange(begin, end) // state.block]).view(last - first, cols)

    return DenseMatrix(UnreadRows(shape=state.shape, itemsize=4, read=read))


def _int8(tensors: PackedTensors) -> PackedMatrix:
    tensors.check(".weight", (torch.int8,))
    rows, cols = tensors.shape(".weight", 2)
    tensors.check(".SCB", (torch.float32,), (rows,))
    if ".weight_format" in tensors and tensors.number(".weight_format") != 0:
        raise tensors.error(".weight_format", "names an order of a GPU's own: expected 0, row after row")

    def stored() -> StoredMatrix:
        scales = tensors.floats(".SCB")[:, None] / 127
        return grouped_rows(
            tensors.rows(".weight"),
            CodeForm.SIGNED,
            cols,
            scales,
            bits=8,
            group_size=max(1, cols),
            minima=scales * -128,
        )

    return PackedMatrix((rows, cols), stored)


FORMAT: Final = _Bitsandbytes

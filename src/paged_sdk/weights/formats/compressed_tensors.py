"""Read compressed-tensors, which LLM Compressor writes: int8 and FP8, packed integers of 1 to 8 bits, NVFP4 and MXFP4.

The config assigns schemes to groups of modules by regular expressions, which are not evaluated, since they are
untrusted: a matrix's tensors determine its scheme, and their bits and group size must match one of the config's groups.
Settings for activations and the KV cache are ignored.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Final, Self

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.quantized.packed_codes import CodeForm, PackedCodes, unpacked
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix, UnreadRows
from paged_sdk.weights.quantized.float8 import FLOAT8, float8_matrix
from paged_sdk.weights.quantized.format import PackedMatrix, QuantizedFormat, without
from paged_sdk.weights.quantized.grouped_reading import (
    E8M0,
    ScaleGrid,
    e2m1_levels,
    find_grid,
    grouped_rows,
    groups_of_columns,
    order_of_columns,
    powers_of_two,
)
from paged_sdk.weights.quantized.nvfp4 import nvfp4_matrix
from paged_sdk.weights.quantized.packed_tensors import FLOATS, PackedTensors
from paged_sdk.weights.quantized.settings import FormatSettings

__all__ = ["FORMAT"]

_FORMATS: Final = (
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
_WEIGHT, _PACKED, _SHAPE = ".weight", ".weight_packed", ".weight_shape"
_SCALE, _ZERO, _GROUPS, _FACTOR = ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale"
_MX_BLOCK: Final = 32


@frozen
class _Scheme:
    """Holds the quantization of a group of modules.

    :ivar symmetric: whether there are no zero points
    :ivar block: the rows and columns that share a scale; None: one scale per row, or per matrix
    """

    bits: int
    symmetric: bool
    block: tuple[int, int] | None

    @classmethod
    def of(cls, weights: FormatSettings) -> _Scheme:
        """Read a group's ``weights``.

        :raises CheckpointError: a setting is malformed
        """
        bits = weights.bits("num_bits", range(1, 9))
        symmetric = weights.flag("symmetric", True)
        match weights.one_of("strategy", ("tensor", "channel", "group", "block", "tensor_group"), "tensor"):
            case "group" | "tensor_group":
                return cls(bits, symmetric, (1, weights.positive("group_size")))
            case "block":
                return cls(bits, symmetric, weights.block("block_structure", (128, 128)))
            case _:
                return cls(bits, symmetric, None)


@frozen
class _CompressedTensors(QuantizedFormat):
    """Reads the format with a checkpoint's settings.

    :ivar schemes: the schemes of the config's groups
    """

    methods: ClassVar[tuple[str, ...]] = ("compressed-tensors",)

    schemes: tuple[_Scheme, ...]

    @classmethod
    def open(cls, settings: FormatSettings) -> Self:
        groups = settings.section("config_groups").sections().values()
        for each in (settings, *groups):
            each.one_of("format", _FORMATS, _FORMATS[0])
        for key in ("transform_config", "sparsity_config"):  # rotations, sparse storage
            if settings.section(key).is_set("config_groups", "format"):
                raise settings.unsupported(key, ("none",))
        return cls(tuple(_Scheme.of(each.section("weights")) for each in groups if "weights" in each))

    @property
    def _blocks(self) -> list[tuple[int, int]]:
        return [scheme.block for scheme in self.schemes if scheme.block is not None]

    def packs(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        if (prefix := without(name, _PACKED)) is not None:
            return prefix, prefix + _WEIGHT
        prefix = without(name, _WEIGHT)
        return (prefix, name) if prefix is not None and dtype in (torch.int8, *FLOAT8) else None

    def owner(self, name: str) -> str | None:
        return without(name, _SCALE, _ZERO, _GROUPS, _FACTOR, _SHAPE)

    def matrix(self, tensors: PackedTensors) -> PackedMatrix:
        if _PACKED not in tensors:
            if tensors.dtype(_WEIGHT) is not torch.int8:
                return float8_matrix(tensors, _WEIGHT, _SCALE, self._blocks)
            rows, cols = tensors.shape(_WEIGHT, 2)
            return self._integers(tensors, _WEIGHT, (rows, cols), 8)
        if tensors.dtype(_PACKED) is not torch.uint8:
            return self._packed_integers(tensors)
        if _FACTOR in tensors:
            return nvfp4_matrix(tensors, _PACKED, _SCALE, _FACTOR, divides=True)
        return _mxfp4(tensors)

    def _packed_integers(self, tensors: PackedTensors) -> PackedMatrix:
        tensors.check(_PACKED, (torch.int32,))
        rows, words = tensors.shape(_PACKED, 2)
        named = tensors.tensor(_SHAPE, (torch.int32, torch.int64), (2,)).tolist()
        found = [scheme.bits for scheme in self.schemes if words == -(-named[1] * scheme.bits // 32)]
        if named[0] != rows or not found or named[1] < 1:
            possible = " or ".join(str(scheme.bits) for scheme in self.schemes)
            raise tensors.error(
                _PACKED,
                f"of shape {[rows, words]} does not have {named} codes of {possible or 'any'} bits, which the config "
                f"and {_SHAPE[1:]} say",
            )
        return self._integers(tensors, _PACKED, (rows, named[1]), found[0])

    def _integers(self, tensors: PackedTensors, codes: str, shape: tuple[int, int], bits: int) -> PackedMatrix:
        """Check the scales and zero points of signed integers; packed ones are stored with an offset, unsigned."""
        grid = find_grid(tensors, _SCALE, FLOATS, shape, self._blocks)
        rows, groups = shape[0], -(-shape[1] // grid.cols)
        if _ZERO in tensors or not any(scheme.symmetric for scheme in self.schemes if scheme.bits == bits):
            if codes == _PACKED:
                tensors.check(_ZERO, (torch.int32,), (-(-rows * bits // 32), groups))
            else:
                find_grid(tensors, _ZERO, (torch.int8,), shape, self._blocks)
        if _GROUPS in tensors:
            tensors.check(_GROUPS, (torch.int32, torch.int64), (shape[1],))
        return PackedMatrix(shape, partial(_stored_integers, tensors, codes, grid, bits))


def _stored_integers(tensors: PackedTensors, codes: str, grid: ScaleGrid, bits: int) -> StoredMatrix:
    rows, cols = grid.shape
    scales = grid.spread(tensors.floats(_SCALE))
    middle = torch.full((), float(1 << (bits - 1)), dtype=torch.float32)
    if _ZERO in tensors:
        stored = tensors.tensor(_ZERO, (torch.int8, torch.int32))
        is_packed = codes == _PACKED
        middle = unpacked(stored.t(), bits)[:, :rows].t().float() if is_packed else grid.spread(stored) + middle
    form = CodeForm.SIGNED if codes == _WEIGHT else CodeForm.STREAM
    minima, order = -scales * middle, None
    if _GROUPS in tensors:
        named = groups_of_columns(tensors, _GROUPS, cols, scales.shape[1])
        order, is_even = order_of_columns(named, grid.cols)
        if not is_even:
            packed = tensors.rows(codes)

            def read(first: int, last: int) -> Tensor:
                words = packed[first:last].tensor()
                own = PackedCodes(words=words, form=form, shape=(last - first, cols), bits=bits).bytes()
                return own * scales[first:last, named] + minima[first:last, named]

            return DenseMatrix(UnreadRows(shape=(rows, cols), itemsize=4, read=read))
    return grouped_rows(
        tensors.rows(codes), form, cols, scales, bits=bits, group_size=grid.cols, minima=minima, order=order
    )


def _mxfp4(tensors: PackedTensors) -> PackedMatrix:
    rows, num_bytes = tensors.shape(_PACKED, 2)
    cols = num_bytes * 2
    if cols % _MX_BLOCK:
        raise tensors.error(_PACKED, f"has {cols} numbers in a row: expected a multiple of {_MX_BLOCK}")
    tensors.check(_SCALE, E8M0, (rows, cols // _MX_BLOCK))

    def stored() -> StoredMatrix:
        return grouped_rows(
            tensors.rows(_PACKED),
            CodeForm.STREAM,
            cols,
            powers_of_two(tensors.tensor(_SCALE, E8M0)),
            bits=4,
            group_size=_MX_BLOCK,
            levels=e2m1_levels(),
        )

    return PackedMatrix((rows, cols), stored)


FORMAT: Final = _CompressedTensors

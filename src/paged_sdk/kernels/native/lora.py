"""Pack LoRA adapters into the native decoder's layout: see ``paged_update`` in ``csrc/abi.h``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ctypes import Array, addressof, c_void_p, sizeof
from typing import Final

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.lora import LoraPart, LoraWeights
from paged_sdk.kernels.native.structures import DTYPES, Decoder, Update
from paged_sdk.kernels.own_pages import own_pages

__all__ = ["NativeAdapters", "NativeLora"]

NUM_PROJECTIONS: Final = 10
_PANEL: Final = 16
_RANKS: Final = 4
"""Ranks are padded with zeros to a multiple of this."""


@frozen(eq=False)
class _Part:
    """Holds the packed update of one matrix.

    :ivar down: [padded rank / 4, cols / 16, 4, 16]
    :ivar up: [padded rows / 16, padded rank, 16]
    :ivar rank: the adapter's rank, without padding
    :ivar rows: the rows of the matrix, without padding
    :ivar gains: as in :class:`LoraPart`, [2, padded rows]
    """

    down: Tensor
    up: Tensor
    rank: int
    rows: slice
    gains: Tensor | None


class NativeLora:
    """Holds one adapter for a stack of layers, in one allocation, with matrices in the order of their use.

    :param layers: for each layer, its updates by the number of their first matrix: query, key, value and attention's
        gate are 0 to 3, output is 4, gate and up are 5 and 6, down is 7 (``PagedProjection``)
    :raises ConfigError: the columns of a part are not a multiple of 16
    """

    def __init__(self, layers: Sequence[Mapping[int, LoraWeights]]) -> None:
        self.num_layers: int = len(layers)
        self.table: Array[Update] = (Update * (NUM_PROJECTIONS * len(layers)))()
        memory = _Memory(sum(_num_bytes(weights) for updates in layers for weights in updates.values()))
        self._layers = [
            {first: _packed(weights, memory) for first, weights in sorted(updates.items())} for updates in layers
        ]
        for layer, updates in enumerate(self._layers):
            for first, parts in updates.items():
                for place, part in enumerate(parts):
                    _describe(self.table[NUM_PROJECTIONS * layer + first + place], part)

    def weights(self) -> list[dict[int, LoraWeights]]:
        """Return the updates in their original form."""
        return [{first: _unpacked(parts) for first, parts in updates.items()} for updates in self._layers]


class _Memory:
    """Allocates tensors consecutively from one piece of memory."""

    def __init__(self, num_bytes: int) -> None:
        self._rest = own_pages(num_bytes)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        taken, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        return taken.view(dtype).view(*shape)


def _num_bytes(weights: LoraWeights) -> int:
    cols = weights.down.shape[1]
    ranks = [(_whole(len(part.up), _RANKS), _whole(part.up.shape[1], _PANEL)) for part in weights.parts]
    return sum(rank * (cols + rows) for rank, rows in ranks) * weights.down.dtype.itemsize


def _whole(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _packed(weights: LoraWeights, memory: _Memory) -> list[_Part]:
    dtype, cols = weights.down.dtype, weights.down.shape[1]
    for part in weights.parts:
        rank, rows = part.up.shape
        if cols % _PANEL:
            raise ConfigError.of("update", (rank, part.rows, cols), "columns in multiples of 16")
    # All parts' down matrices come first, since they are multiplied before the up matrices.
    downs = []
    for part in weights.parts:
        down = memory.take((_whole(len(part.up), _RANKS) // _RANKS, cols // _PANEL, _RANKS, _PANEL), dtype)
        ranks = F.pad(weights.down[part.ranks], (0, 0, 0, -len(part.up) % _RANKS))
        downs.append(down.copy_(ranks.view(-1, _RANKS, cols // _PANEL, _PANEL).transpose(1, 2)))
    packed = []
    for part, down in zip(weights.parts, downs, strict=True):
        rank, rows = part.up.shape
        up = memory.take((_whole(rows, _PANEL) // _PANEL, _whole(rank, _RANKS), _PANEL), dtype)
        padded = F.pad(part.up, (0, -rows % _PANEL, 0, -rank % _RANKS))
        up.copy_(torch.unflatten(padded, 1, (-1, _PANEL)).transpose(0, 1))
        gains = None if part.gains is None else F.pad(part.gains.float(), (0, -rows % _PANEL)).contiguous()
        packed.append(_Part(down, up, rank, part.rows, gains))
    return packed


def _unpacked(packed: Sequence[_Part]) -> LoraWeights:
    parts, downs, first = [], [], 0
    for part in packed:
        downs.append(part.down.transpose(1, 2).flatten(2).flatten(0, 1)[: part.rank])
        rows = part.rows.stop - part.rows.start
        up = part.up.transpose(0, 1).flatten(1)[: part.rank, :rows].contiguous()
        gains = None if part.gains is None else part.gains[:, :rows]
        parts.append(LoraPart(part.rows, slice(first, first + part.rank), up, gains))
        first += part.rank
    return LoraWeights(torch.cat(downs), tuple(parts))


def _describe(target: Update, part: _Part) -> None:
    target.down, target.up, target.dtype = part.down.data_ptr(), part.up.data_ptr(), DTYPES[part.down.dtype]
    target.gains = None if part.gains is None else part.gains.data_ptr()
    target.rank, target.rows = _RANKS * len(part.down), part.rows.stop - part.rows.start
    target.first = part.rows.start


@frozen(eq=False)
class NativeAdapters:
    """Maps the rows of a step to their adapters.

    :ivar loras: the adapters, at least one
    :ivar numbers: ``[num_rows]`` int32, contiguous: each row's index into ``loras``; -1: no adapter
    """

    loras: Sequence[NativeLora]
    numbers: Tensor

    def bind(self, args: Decoder, *, num_layers: int, num_rows: int, first_layer: int = 0) -> object:
        """Set the adapters of a native call, and return an object that must outlive the call.

        :param num_layers: number of layers of the model
        :param first_layer: the first layer that the call runs
        :raises ConfigError: ``numbers`` has another shape, dtype or layout, or an adapter another number of layers
        """
        numbers = self.numbers
        if numbers.shape != (num_rows,) or numbers.dtype != torch.int32 or not numbers.is_contiguous():
            raise ConfigError.of(
                "numbers", f"{numbers.dtype} {tuple(numbers.shape)}", f"contiguous int32 ({num_rows},)"
            )
        for lora in self.loras:
            if lora.num_layers != num_layers:
                raise ConfigError.of("layers of an adapter", lora.num_layers, str(num_layers))
        skipped = first_layer * NUM_PROJECTIONS * sizeof(Update)
        tables = (c_void_p * len(self.loras))(*(addressof(lora.table) + skipped for lora in self.loras))
        args.adapters, args.adapter_of_row = addressof(tables), numbers.data_ptr()
        args.num_adapters = len(self.loras)
        return tables

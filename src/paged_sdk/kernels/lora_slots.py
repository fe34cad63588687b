"""Keep adapters in a table on the device, so that recorded CUDA graphs look them up by slot when replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.lora import Lora, LoraWeights
from paged_sdk.kernels.lora_table import TableField

__all__ = ["AdapterSlots", "SlotRows"]

_NUM_SLOTS: Final = 16
_LARGEST_RANK: Final = 64
"""Each launch has one program per 16 ranks up to this; programs beyond an adapter's rank exit at once."""


class AdapterSlots:
    """Holds, for each linear layer, a table of the addresses of adapters' updates.

    :param layers: by layer name, the output columns of each of the layer's matrices
    :param num_rows: number of rows of the largest step
    """

    def __init__(self, layers: Mapping[str, Sequence[slice]], *, num_rows: int, device: torch.device) -> None:
        self._layers = {name: _Layer.of(rows, device) for name, rows in layers.items()}
        widest = max((len(rows) for rows in layers.values()), default=0)
        # Shared by all layers, which run one after another.
        self._shrunk = torch.empty(num_rows * widest * _LARGEST_RANK, dtype=torch.float32, device=device)
        self._places: dict[int, int] = {}

    def put(self, number: int, lora: Lora) -> None:
        """Add an adapter if it fits: it updates neither the output projection nor the embeddings, its rank is within
        :data:`_LARGEST_RANK`, and a slot is free. Steps with other adapters are launched one operation at a time.

        :param number: identifies the adapter
        """
        ranks = [len(part.up) for weights in lora.by_layer.values() for part in weights.parts]
        free = sorted(set(range(_NUM_SLOTS)) - set(self._places.values()))
        if lora.head is not None or lora.embedding is not None or max(ranks, default=0) > _LARGEST_RANK or not free:
            return
        for name, layer in self._layers.items():
            layer.table[free[0]].copy_(layer.entries(lora.by_layer.get(name)))
        self._places[number] = free[0]

    def drop(self, number: int) -> None:
        """Remove an adapter, if present."""
        self._places.pop(number, None)

    def place(self, number: int) -> int | None:
        """Return an adapter's slot, or None if the tables do not hold it."""
        return self._places.get(number)

    def add_(self, out: Tensor, x: Tensor, places: Tensor, name: str) -> None:
        """Add the updates of a layer to its outputs; see :func:`~paged_sdk.kernels.triton.lora.add_lora_by_slot_`.

        :param places: each row's slot
        :param name: the name of the layer
        """
        from paged_sdk.kernels.triton.lora import add_lora_by_slot_

        layer = self._layers[name]
        num_matrices = len(layer.starts) - 1
        shrunk = self._shrunk[: len(x) * num_matrices * _LARGEST_RANK].view(len(x), num_matrices, _LARGEST_RANK)
        add_lora_by_slot_(out, x, places, layer.table, layer.starts, shrunk, widest=layer.widest)


@frozen(eq=False)
class SlotRows:
    """Maps the tokens of a recorded step to adapter slots.

    :ivar places: ``[num_tokens]`` int64 on the device: the slot of each token's adapter; -1: no adapter
    """

    slots: AdapterSlots
    places: Tensor


@frozen(eq=False)
class _Layer:
    """Holds a layer's kernel arguments.

    :ivar table: ``[num_slots, num_matrices, 4]`` int64: see :class:`~paged_sdk.kernels.lora_table.TableField`
    :ivar starts: ``[num_matrices + 1]`` int32: first output column of each matrix, and the end
    :ivar rows: the output columns of each matrix
    :ivar widest: the most columns of a matrix
    """

    table: Tensor
    starts: Tensor
    rows: tuple[slice, ...]
    widest: int

    @classmethod
    def of(cls, rows: Sequence[slice], device: torch.device) -> _Layer:
        ends = [0, *(each.stop for each in rows)]
        assert ends[:-1] == [each.start for each in rows], "a layer's matrices do not follow one another"
        return cls(
            torch.zeros(_NUM_SLOTS, len(rows), len(TableField), dtype=torch.int64, device=device),
            torch.tensor(ends, dtype=torch.int32, device=device),
            tuple(rows),
            max(each.stop - each.start for each in rows),
        )

    def entries(self, weights: LoraWeights | None) -> Tensor:
        """Return the table entries of an adapter's update, ``[num_matrices, 4]``, in CPU memory."""
        found = torch.zeros(self.table.shape[1:], dtype=torch.int64)
        for part in () if weights is None else weights.parts:
            assert weights is not None
            down, place = weights.down[part.ranks], self.rows.index(part.rows)
            for field, tensor in ((TableField.DOWN, down), (TableField.UP, part.up), (TableField.GAINS, part.gains)):
                if tensor is not None:
                    assert tensor.is_contiguous(), (field.name, tensor.stride())
                    found[place, field] = tensor.data_ptr()
            found[place, TableField.RANK] = len(part.up)
        return found

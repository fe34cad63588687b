"""Keep adapters where recorded steps of a device find them: a step's rows name places of a table, not adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.lora import Lora, LoraWeights

__all__ = ["AdapterSlots", "SlotRows"]

_NUM_SLOTS: Final = 16
_LARGEST_RANK: Final = 64
"""Programs for ranks that an adapter lacks end at once; each launch has one for every 16 that it could have."""
_FIELDS: Final = 4  # see kernels/triton/lora.py


class AdapterSlots:
    """Holds, of each linear layer, where the updates of some adapters are.

    :param layers: of each layer by its name, the outputs of each of its matrices
    :param num_rows: of the largest step
    """

    def __init__(self, layers: Mapping[str, Sequence[slice]], *, num_rows: int, device: torch.device) -> None:
        self._layers = {name: _Layer.of(rows, device) for name, rows in layers.items()}
        widest = max((len(rows) for rows in layers.values()), default=0)
        # One for all layers, which follow one another.
        self._shrunk = torch.empty(num_rows * widest * _LARGEST_RANK, dtype=torch.float32, device=device)
        self._places: dict[int, int] = {}

    def put(self, number: int, lora: Lora) -> None:
        """Take an adapter in, if it can be: steps with others are launched one operation at a time.

        :param number: identifies it
        """
        ranks = [len(part.up) for weights in lora.of.values() for part in weights.parts]
        free = sorted(set(range(_NUM_SLOTS)) - set(self._places.values()))
        if lora.head is not None or lora.embedding is not None or max(ranks, default=0) > _LARGEST_RANK or not free:
            return
        for name, layer in self._layers.items():
            layer.table[free[0]].copy_(layer.entries(lora.of.get(name)))
        self._places[number] = free[0]

    def drop(self, number: int) -> None:
        """Let an adapter go, which need not be there."""
        self._places.pop(number, None)

    def place(self, number: int) -> int | None:
        """Return the place that rows of an adapter name; None: it is not here."""
        return self._places.get(number)

    def add_(self, out: Tensor, x: Tensor, places: Tensor, name: str) -> None:
        """Add the updates of a layer to its outputs; parameters are those of
        :func:`~paged_sdk.kernels.triton.lora.add_lora_by_slot_`.
        """
        from paged_sdk.kernels.triton.lora import add_lora_by_slot_

        layer = self._layers[name]
        num_matrices = len(layer.starts) - 1
        shrunk = self._shrunk[: len(x) * num_matrices * _LARGEST_RANK].view(len(x), num_matrices, _LARGEST_RANK)
        add_lora_by_slot_(out, x, places, layer.table, layer.starts, shrunk, widest=layer.widest)


@frozen(eq=False)
class SlotRows:
    """Says which place of a table each token of a recorded step names.

    :ivar places: ``[num_tokens]`` int64 on the device; -1: none
    """

    slots: AdapterSlots
    places: Tensor


@frozen(eq=False)
class _Layer:
    """Holds what the kernels are given of a layer.

    :ivar table: ``[num_slots, num_matrices, 4]`` int64
    :ivar starts: ``[num_matrices + 1]`` int32
    :ivar rows: the outputs of each matrix
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
            torch.zeros(_NUM_SLOTS, len(rows), _FIELDS, dtype=torch.int64, device=device),
            torch.tensor(ends, dtype=torch.int32, device=device),
            tuple(rows),
            max(each.stop - each.start for each in rows),
        )

    def entries(self, weights: LoraWeights | None) -> Tensor:
        """Return what the table says of an adapter's update, in CPU memory."""
        found = torch.zeros(self.table.shape[1:], dtype=torch.int64)
        for part in () if weights is None else weights.parts:
            assert weights is not None
            assert part.up.is_contiguous(), part.up.stride()
            gains = 0 if part.gains is None else part.gains.data_ptr()
            down = weights.down[part.ranks]
            place = self.rows.index(part.rows)
            found[place] = torch.tensor([down.data_ptr(), part.up.data_ptr(), gains, len(part.up)])
        return found

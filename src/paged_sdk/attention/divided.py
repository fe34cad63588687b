"""Keeps each layer's KV on that layer's device, for models on several devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend, KvStorage
from paged_sdk.kernels.attention_inputs import LearnedScores
from paged_sdk.kernels.native.paged_attention import NativeRows
from paged_sdk.kernels.placement import Placement, working_on
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.kernels.step import AttentionStep
from paged_sdk.types.step import StepRow

__all__ = ["DividedBackend", "divided_storage"]

_T = TypeVar("_T")


def divided_storage(placement: Placement, storages: Mapping[torch.device, KvStorage]) -> KvStorage:
    """Join the storages of a model's devices.

    :param storages: by device, the storage of the layers there
    """

    def make(num_blocks: int) -> DividedBackend:
        made: dict[torch.device, AttentionBackend] = {}
        for device, storage in storages.items():
            with working_on(device):
                made[device] = storage.make(num_blocks)
        return DividedBackend(placement, made)

    return KvStorage(make=make, scratch={device: each.scratch.get(device, 0) for device, each in storages.items()})


class DividedBackend(AttentionBackend):
    """Joins one backend per device. Block ids are the same on all devices.

    :ivar parts: the backend of each device, which numbers its own layers from 0
    """

    def __init__(self, placement: Placement, parts: Mapping[torch.device, AttentionBackend]) -> None:
        self.parts = parts
        self._places = [
            _Place(device, placement.layers_on(device).index(layer)) for layer, device in enumerate(placement.layers)
        ]

    def part_of(self, layers: range) -> tuple[AttentionBackend, range]:
        """Return the backend of a range of layers on one device, and the layers' numbers within that backend."""
        first = self._places[layers.start]
        return self.parts[first.device], range(first.number, first.number + len(layers))

    def prepare(self, rows: Sequence[StepRow]) -> AttentionStep:
        """See :meth:`AttentionBackend.prepare`. A step's indices are made once per device, for all its layers."""
        return _DividedStep(self._places, self._on_each(lambda part: part.prepare(rows)))

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """See :meth:`AttentionBackend.copy`."""
        self._on_each(lambda part: part.copy(copies))

    def release(self, kv_ids: Iterable[int]) -> None:
        """See :meth:`AttentionBackend.release`."""
        released = tuple(kv_ids)
        self._on_each(lambda part: part.release(released))

    @property
    def num_bytes(self) -> int:
        """Return the bytes on all devices."""
        return sum(part.num_bytes for part in self.parts.values())

    @property
    def block_tensors(self) -> Sequence[Tensor]:
        """Return the tensors of all devices."""
        return [tensor for part in self.parts.values() for tensor in part.block_tensors]

    @property
    def code(self) -> bytes:
        """Return those of all devices."""
        return b"".join(part.code for part in self.parts.values())

    @property
    def windows(self) -> Sequence[int | None]:
        """See :attr:`AttentionBackend.windows`."""
        return tuple(dict.fromkeys(window for part in self.parts.values() for window in part.windows))

    def _on_each(self, do: Callable[[AttentionBackend], _T]) -> dict[torch.device, _T]:
        done: dict[torch.device, _T] = {}
        for device, part in self.parts.items():
            with working_on(device):
                done[device] = do(part)
        return done


@frozen
class _Place:
    """Locates a layer: its device, and its number among the layers of that device."""

    device: torch.device
    number: int


class _DividedStep(AttentionStep):
    def __init__(self, places: Sequence[_Place], steps: Mapping[torch.device, AttentionStep]) -> None:
        self._places = places
        self._steps = steps

    @property
    def native_rows(self) -> NativeRows | None:
        """Return the rows in the form that the layers on the CPU take, or None if no backend has that form."""
        return next((rows for step in self._steps.values() if (rows := step.native_rows) is not None), None)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        place = self._places[layer]
        self._steps[place.device].write(place.number, key, value)

    def attend(self, layer: int, query: Tensor, learned: LearnedScores | None = None) -> Tensor:
        place = self._places[layer]
        return self._steps[place.device].attend(place.number, query, learned)

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, learned: LearnedScores | None = None
    ) -> Tensor:
        place = self._places[layer]
        return self._steps[place.device].forward(place.number, query, key, value, learned)

    def rotate_and_forward(
        self, layer: int, query_key: Tensor, value: Tensor, rotation: Rotation, learned: LearnedScores | None = None
    ) -> Tensor:
        place = self._places[layer]
        return self._steps[place.device].rotate_and_forward(place.number, query_key, value, rotation, learned)

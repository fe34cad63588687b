"""Places of adapters for recorded steps."""

from __future__ import annotations

import pytest
import torch

from paged_sdk.kernels.lora import Lora, LoraPart, LoraWeights
from paged_sdk.kernels.lora_slots import AdapterSlots


def lora(rank: int, *, head: bool = False) -> Lora:
    weights = LoraWeights(torch.ones(rank, 32), (LoraPart(slice(16, 48), slice(0, rank), torch.ones(rank, 32)),))
    return Lora({"layer": weights}, head=weights if head else None)


def test_adapters_take_free_places() -> None:
    slots = AdapterSlots(
        {"layer": (slice(0, 16), slice(16, 48)), "other": (slice(0, 8),)}, num_rows=4, device=torch.device("cpu")
    )
    for number in range(17):
        slots.put(number, lora(4))
    assert [slots.place(number) for number in range(17)] == [*range(16), None]
    slots.drop(3)
    slots.drop(16)
    assert slots.place(3) is None
    slots.put(17, lora(64))
    assert slots.place(17) == 3


def test_adapters_that_recorded_steps_cannot_have() -> None:
    slots = AdapterSlots({"layer": (slice(0, 16), slice(16, 48))}, num_rows=4, device=torch.device("cpu"))
    slots.put(0, lora(65))
    slots.put(1, lora(4, head=True))
    assert slots.place(0) is slots.place(1) is None


@pytest.mark.parametrize("name", ["down", "up", "gains"])
def test_the_kernels_read_contiguous_updates_alone(name: str) -> None:
    parts = {"down": torch.ones(4, 32), "up": torch.ones(4, 32), "gains": torch.ones(2, 32)}
    parts[name] = parts[name].t().contiguous().t()
    part = LoraPart(slice(0, 32), slice(0, 4), parts["up"], parts["gains"])
    slots = AdapterSlots({"layer": (slice(0, 32),)}, num_rows=4, device=torch.device("cpu"))
    with pytest.raises(AssertionError, match=name.upper()):
        slots.put(0, Lora({"layer": LoraWeights(parts["down"], (part,))}))

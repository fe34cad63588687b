"""Adapters' updates by slots in Triton, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paged_sdk.kernels.lora import LoraPart, LoraWeights, add_lora_

pytest.importorskip("triton")

HEIGHTS = (144, 32, 48)  # of three matrices of a layer; more outputs than one program takes
COLS = 288
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def random_weights(ranks: tuple[int, int, int], dtype: torch.dtype, *, seed: int, scales: bool) -> LoraWeights:
    """Make an update; a rank of 0 leaves a matrix alone."""
    generator = torch.Generator().manual_seed(seed)
    parts, first, begin = [], 0, 0
    for rank, height in zip(ranks, HEIGHTS, strict=True):
        rows = slice(begin, begin + height)
        begin += height
        if rank:
            up = torch.randn(rank, height, generator=generator).to(dtype)
            gains = 1 + torch.randn(2, height, generator=generator) / 4 if scales else None
            parts.append(LoraPart(rows, slice(first, first + rank), up, gains))
            first += rank
    down = torch.randn(first, COLS, generator=generator).to(dtype) / 16
    return LoraWeights(down, tuple(parts))


def entries(weights: LoraWeights) -> Tensor:
    """Return what the table says of an update."""
    found = torch.zeros(len(HEIGHTS), 4, dtype=torch.int64)
    begins = [sum(HEIGHTS[:place]) for place in range(len(HEIGHTS))]
    for part in weights.parts:
        gains = 0 if part.gains is None else part.gains.data_ptr()
        down = weights.down[part.ranks]
        found[begins.index(part.rows.start)] = torch.tensor(
            [down.data_ptr(), part.up.data_ptr(), gains, len(part.up)], dtype=torch.int64
        )
    return found


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_rows_of_several_adapters(triton_device: torch.device, dtype: torch.dtype) -> None:
    from paged_sdk.kernels.triton.lora import add_lora_by_slot_

    updates = [
        random_weights((3, 16, 20), dtype, seed=0, scales=False),
        random_weights((16, 0, 33), dtype, seed=1, scales=True),
    ]
    slots = torch.tensor([1, -1, 0, 2, 1, 0])  # of slot 2 nothing is said
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(len(slots), COLS, generator=generator).to(dtype)
    out = torch.randn(len(slots), sum(HEIGHTS) + 16, generator=generator).to(dtype)
    expected = out.double()
    for number, update in enumerate(updates):
        exact = LoraWeights(
            update.down.double(),
            tuple(LoraPart(p.rows, p.ranks, p.up.double(), p.gains) for p in update.parts),
        )
        add_lora_(expected, x.double(), exact, (slots == number).nonzero().flatten())

    def on_device(weights: LoraWeights) -> LoraWeights:
        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(triton_device)

        parts = tuple(LoraPart(p.rows, p.ranks, p.up.to(triton_device), moved(p.gains)) for p in weights.parts)
        return LoraWeights(weights.down.to(triton_device), parts)

    held = [on_device(update) for update in updates]
    table = torch.zeros(3, len(HEIGHTS), 4, dtype=torch.int64)
    for number, update in enumerate(held):
        table[number] = entries(update)
    starts = torch.tensor([0, *HEIGHTS]).cumsum(0).int()
    shrunk = torch.full((len(slots), len(HEIGHTS), 48), torch.nan, device=triton_device)
    found = out.to(triton_device)
    add_lora_by_slot_(
        found,
        x.to(triton_device),
        slots.to(triton_device),
        table.to(triton_device),
        starts.to(triton_device),
        shrunk,
        widest=max(HEIGHTS),
    )
    torch.testing.assert_close(found.cpu().double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * 4)
    assert torch.equal(found[1].cpu(), out[1])
    assert torch.equal(found[3].cpu(), out[3])

"""Blocks leave the pool and come back as they were, in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paged_sdk.runner.block_content import BlockContent, BlockMemory


def pool(*dtypes: torch.dtype, num_blocks: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(num_blocks, 4, 2, 8), (num_blocks, 4, 2)]
    return [
        torch.randint(0, 256, (*shapes[place % 2], dtype.itemsize), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .squeeze(-1)
        for place, dtype in enumerate(dtypes)
    ]


def as_bytes(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone().view(torch.uint8) for tensor in tensors]


DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float8_e4m3fn, torch.float32, torch.float8_e4m3fn, torch.float32),
]


@pytest.mark.parametrize("dtypes", DTYPES)
def test_blocks_come_back_elsewhere(dtypes: tuple[torch.dtype, ...]) -> None:
    tensors = pool(*dtypes)
    before, content = as_bytes(tensors), BlockContent(tensors)
    memory = content.copy_out([4, 1]).wait()
    assert memory.num_bytes == 2 * sum(content.sizes) == sum(tensor[:2].nbytes for tensor in tensors)
    content.copy_in([0, 5], memory, [1, 0])
    for old, new in zip(before, as_bytes(tensors), strict=True):
        assert torch.equal(new[0], old[1])
        assert torch.equal(new[5], old[4])
        assert torch.equal(new[1:5], old[1:5])


def test_a_copy_does_not_follow_the_pool() -> None:
    tensors = pool(torch.bfloat16, torch.bfloat16)
    before = as_bytes(tensors)
    copies = BlockContent(tensors).copy_out([2])
    for tensor in tensors:
        tensor.zero_()
    assert [piece.tobytes() for piece in copies.wait().pieces(0)] == [old[2].numpy().tobytes() for old in before]


def test_pieces_are_the_memory_of_one_block() -> None:
    tensors = pool(torch.float32, torch.float32)
    content = BlockContent(tensors)
    memory = BlockMemory.empty(3, content.sizes)
    source = content.copy_out([3]).wait()
    for target, piece in zip(memory.pieces(2), source.pieces(0), strict=True):
        target[:] = piece
    content.copy_in([0], memory, [2])
    assert all(torch.equal(tensor[0].view(torch.uint8), tensor[3].view(torch.uint8)) for tensor in tensors)


def test_the_pool_may_have_been_made_in_inference_mode() -> None:
    with torch.inference_mode():
        tensors = pool(torch.float32, torch.float32)
    content = BlockContent(tensors)
    content.copy_in([0], content.copy_out([1]).wait(), [0])
    assert all(torch.equal(tensor[0].view(torch.uint8), tensor[1].view(torch.uint8)) for tensor in tensors)

"""Memory for weights: where it lies, and when it goes."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from paged_sdk.kernels.own_pages import HUGE_PAGE, LastingMemory, own_pages

SIZES = (1, 63, 64, 65, 500_000, 3 << 20, 31 << 20, 7, 33 << 20, 100, 20 << 20, 20 << 20, 32 << 20)


def test_matrices_have_memory_of_their_own_that_begins_at_a_line() -> None:
    memory = LastingMemory()
    with ThreadPoolExecutor(4) as threads:
        tensors = list(threads.map(memory, SIZES * 3))
    for index, (tensor, size) in enumerate(zip(tensors, SIZES * 3, strict=True)):
        assert tensor.shape == (size,)
        assert tensor.dtype == torch.uint8
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(index)
    assert all(bool((tensor == index).all()) for index, tensor in enumerate(tensors))


def test_small_matrices_lie_one_behind_the_other_where_a_huge_page_begins() -> None:
    memory = LastingMemory()
    first, *others = (memory(100_000) for _ in range(200))
    assert first.data_ptr() % HUGE_PAGE == 0
    step = 100_032  # whole lines
    assert [other.data_ptr() - first.data_ptr() for other in others] == [step * (1 + k) for k in range(len(others))]


def test_a_matrix_larger_than_a_block_leaves_the_block_to_others() -> None:
    memory = LastingMemory()
    first, large, second = memory(64), memory(40 << 20), memory(64)
    assert large.data_ptr() % HUGE_PAGE == 0
    assert second.data_ptr() - first.data_ptr() == 64


def test_pages_of_its_own_are_a_whole_mapping() -> None:
    assert own_pages(2 << 20).data_ptr() % 4096 == 0
    assert len(own_pages(100)) == 100


@pytest.mark.skipif(sys.platform != "linux", reason="what is resident is read from /proc")
def test_blocks_go_back_to_the_system_with_the_last_matrix_in_them() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    memory = LastingMemory()
    tensors = [memory(4 << 20).fill_(1) for _ in range(15)]
    last, before = memory(64), resident()
    del tensors, memory
    assert resident() < before - (24 << 20)  # the first block of two
    last.fill_(1)
    between = resident()
    del last
    assert resident() < between - (24 << 20)

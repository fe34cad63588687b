"""Huge pages under memory that fills: which are made when, and that nothing of what is there changes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from native_weights import needs_library, workspace
from paged_sdk.kernels.native.huge_pages import HUGE_PAGE, HugePages
from paged_sdk.kernels.native.library import NativeLibrary

ROW = 48 << 10
NUM_ROWS = 200


def tensors() -> list[Tensor]:
    return [torch.arange(NUM_ROWS * ROW // 8).view(NUM_ROWS, -1) for _ in range(3)]


def library(collapse: Callable[[int], int]) -> NativeLibrary:
    functions: Any = SimpleNamespace(paged_collapse_huge_page=collapse)
    return cast("NativeLibrary", SimpleNamespace(functions=functions))


def test_whole_pages_are_collapsed_once_they_are_filled_a_few_at_a_time() -> None:
    memory, made = tensors(), []  # type: list[Tensor], list[int]

    def collapse(address: int) -> int:
        made.append(address)
        return 1

    pages = HugePages(library(collapse), memory)
    for filled in range(NUM_ROWS + 1):
        before = len(made)
        pages.follow(filled)
        assert len(made) - before <= 4
        for address in made[before:]:
            assert address % HUGE_PAGE == 0
            (offset,) = (address - t.data_ptr() for t in memory if 0 <= address - t.data_ptr() < t.nbytes)
            assert offset + HUGE_PAGE <= filled * ROW
    expected = {
        address
        for t in memory
        for address in range(
            -(-t.data_ptr() // HUGE_PAGE) * HUGE_PAGE, t.data_ptr() + t.nbytes - HUGE_PAGE + 1, HUGE_PAGE
        )
    }
    assert len(expected) >= 3 * 3
    assert len(made) == len(expected)
    assert set(made) == expected


def test_nothing_more_is_tried_where_the_system_refuses() -> None:
    tried = []

    def refuse(address: int) -> int:
        tried.append(address)
        return 0

    pages = HugePages(library(refuse), tensors())
    for filled in range(NUM_ROWS + 1):
        pages.follow(filled)
    assert len(tried) == 1


def test_tensors_smaller_than_a_page_have_none() -> None:
    def never(address: int) -> int:
        raise AssertionError(address)

    HugePages(library(never), [torch.zeros(4, 8)]).follow(4)


@needs_library
def test_contents_stay() -> None:
    memory = tensors()
    pages = HugePages(workspace().library, memory)
    for filled in range(NUM_ROWS + 1):
        pages.follow(filled)
    expected = torch.arange(NUM_ROWS * ROW // 8)
    assert all(torch.equal(tensor.flatten(), expected) for tensor in memory)

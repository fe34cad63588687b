"""Huge pages under memory that fills: which are made when, and that nothing of what is there changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from native_weights import needs_library, workspace
from paged_sdk.kernels.native.huge_pages import HugePages
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.own_pages import HUGE_PAGE

ROW = 48 << 10
NUM_ROWS = 200


def tensors() -> list[Tensor]:
    return [torch.arange(NUM_ROWS * ROW // 8).view(NUM_ROWS, -1) for _ in range(3)]


def library(collapse: Callable[[int], int]) -> NativeLibrary:
    functions: Any = SimpleNamespace(paged_collapse_huge_page=collapse)
    return cast("NativeLibrary", SimpleNamespace(functions=functions))


class Clock:
    """Tells the time that a test has let go by."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Collapsing:
    """Stands in for the system: each page takes so many seconds."""

    def __init__(self, clock: Clock, memory: Sequence[Tensor], seconds: float = 0.001) -> None:
        self.made: list[int] = []
        self._clock = clock
        self._seconds = seconds
        self.pages = HugePages(library(self._collapse), memory, clock=clock)

    def _collapse(self, address: int) -> int:
        self.made.append(address)
        self._clock.seconds += self._seconds
        return 1

    def after(self, seconds: float, num_filled: int) -> int:
        """Let time go by, then follow; return how many pages were made."""
        self._clock.seconds += seconds
        before = len(self.made)
        self.pages.follow(num_filled)
        return len(self.made) - before


def all_pages(memory: Sequence[Tensor]) -> list[int]:
    starts = [(tensor, -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE) for tensor in memory]
    return [
        address
        for tensor, first in starts
        for address in range(first, tensor.data_ptr() + tensor.nbytes - HUGE_PAGE + 1, HUGE_PAGE)
    ]


def test_whole_pages_are_collapsed_once_they_are_filled() -> None:
    memory = tensors()
    system = Collapsing(Clock(), memory)
    for filled in range(NUM_ROWS + 1):
        before = len(system.made)
        system.after(1, filled)
        for address in system.made[before:]:
            assert address % HUGE_PAGE == 0
            (offset,) = (address - t.data_ptr() for t in memory if 0 <= address - t.data_ptr() < t.nbytes)
            assert offset + HUGE_PAGE <= filled * ROW
    assert len(all_pages(memory)) >= 3 * 3
    assert sorted(system.made) == sorted(all_pages(memory))


def test_steps_give_a_fiftieth_of_their_time() -> None:
    system = Collapsing(Clock(), tensors())
    steps = [system.after(0.008, NUM_ROWS) for _ in range(40)]
    # The first page of 1 ms is made on credit; each further one is paid for by 50 ms, which are six steps or seven.
    assert max(steps) == 1
    made = [step for step, pages in enumerate(steps) if pages]
    assert len(made) in (6, 7)
    assert all(6 <= later - earlier <= 7 for earlier, later in pairwise(made))


def test_the_long_steps_of_a_prompt_pay_for_many_pages_and_a_pause_for_no_more_than_a_limit() -> None:
    system = Collapsing(Clock(), tensors())
    assert system.after(0.15, NUM_ROWS) == 3
    assert system.after(3600, NUM_ROWS) == 6
    assert system.after(0.008, NUM_ROWS) <= 1


def test_a_page_that_takes_long_is_paid_for_before_the_next() -> None:
    system = Collapsing(Clock(), tensors(), seconds=0.02)
    assert system.after(1, NUM_ROWS) == 1
    assert [system.after(0.11, NUM_ROWS) for _ in range(8)] == [0, 0, 0, 0, 0, 0, 1, 0]


def test_nothing_more_is_tried_where_the_system_refuses() -> None:
    tried = []

    def refuse(address: int) -> int:
        tried.append(address)
        return 0

    clock = Clock()
    pages = HugePages(library(refuse), tensors(), clock=clock)
    for filled in range(NUM_ROWS + 1):
        clock.seconds += 1
        pages.follow(filled)
    assert len(tried) == 1


def test_tensors_smaller_than_a_page_have_none() -> None:
    def never(address: int) -> int:
        raise AssertionError(address)

    clock = Clock()
    pages = HugePages(library(never), [torch.zeros(4, 8)], clock=clock)
    clock.seconds += 1
    pages.follow(4)


@needs_library
def test_contents_stay() -> None:
    memory = tensors()
    clock = Clock()
    pages = HugePages(workspace().library, memory, clock=clock)
    for filled in range(NUM_ROWS + 1):
        clock.seconds += 1
        pages.follow(filled)
    expected = torch.arange(NUM_ROWS * ROW // 8)
    assert all(torch.equal(tensor.flatten(), expected) for tensor in memory)

"""Block tables on the device against the lists that they are made from."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paged_sdk.attention.block_tables import BlockTables

CPU = torch.device("cpu")


def rows_of(tables: BlockTables, lists: list[list[int]]) -> list[list[int]]:
    """What the device has of some tables."""
    seats = tables.place(lists)
    assert len(set(seats.tolist())) == len(lists)
    rows: Tensor = tables.tensor[torch.from_numpy(seats)]
    return [row[: len(table)].tolist() for row, table in zip(rows, lists, strict=True)]


def test_tables_that_come_grow_go_and_come_again() -> None:
    generator = random.Random(0)
    tables = BlockTables(4, 20, CPU)
    lists = [[generator.randrange(99) for _ in range(generator.randrange(1, 9))] for _ in range(9)]
    for _ in range(300):
        chosen = generator.sample(range(9), generator.randrange(1, 5))
        for index in chosen:
            if generator.random() < 0.3 and len(lists[index]) < 20:
                lists[index].append(generator.randrange(99))
            elif generator.random() < 0.1:
                lists[index] = [generator.randrange(99) for _ in range(generator.randrange(1, 9))]
        step = [lists[index] for index in chosen]
        assert rows_of(tables, step) == step
        assert tables.tensor[tables.nobody].eq(0).all()


def test_equal_tables_are_told_apart() -> None:
    first, second = [1, 2], [1, 2]
    tables = BlockTables(2, 8, CPU)
    assert rows_of(tables, [first, second]) == [first, second]
    first.append(3)
    second.append(4)
    assert rows_of(tables, [second, first]) == [[1, 2, 4], [1, 2, 3]]


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_what_has_not_changed_is_not_sent() -> None:
    lists = [[1, 2], [3], [4]]
    tables = BlockTables(3, 8, CPU)
    with Operations() as first:
        tables.place(lists)
    with Operations() as second:
        tables.place(lists[::-1])
    assert (first.count > 0, second.count) == (True, 0)


def test_more_rows_than_seats() -> None:
    with pytest.raises(AssertionError, match="2 tables, 1 seats"):
        BlockTables(1, 8, CPU).place([[1], [2]])

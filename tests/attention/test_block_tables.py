"""Block tables on the device against the lists that they are made from."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paged_sdk.attention.block_tables import BlockTables

CPU = torch.device("cpu")


class Owner:
    """Owns a sequence's table."""

    def __init__(self, seq_id: int, ids: list[int]) -> None:
        self.seq_id = seq_id
        self.version = 1
        self.ids = ids


def place(tables: BlockTables, owners: Sequence[Owner]) -> list[int]:
    """Return the seats of a step's rows."""
    seats = tables.place([o.seq_id for o in owners], [o.version for o in owners], [o.ids for o in owners])
    found: list[int] = seats.tolist()
    return found


def rows_of(tables: BlockTables, owners: Sequence[Owner]) -> list[list[int]]:
    """Return the device's rows of some tables."""
    seats = place(tables, owners)
    assert len(set(seats)) == len(owners)
    return [tables.tensor[seat, : len(owner.ids)].tolist() for seat, owner in zip(seats, owners, strict=True)]


def test_tables_that_come_grow_go_and_come_again() -> None:
    generator = random.Random(0)
    tables = BlockTables(4, 20, CPU)

    def some_ids() -> list[int]:
        return [generator.randrange(99) for _ in range(generator.randrange(1, 9))]

    owners = [Owner(seq_id, some_ids()) for seq_id in range(9)]
    for _ in range(300):
        step = generator.sample(owners, generator.randrange(1, 5))
        for owner in step:
            if generator.random() < 0.3 and len(owner.ids) < 20:
                owner.ids.append(generator.randrange(99))
            elif generator.random() < 0.1:
                owner.ids, owner.version = some_ids(), owner.version + 1
        assert rows_of(tables, step) == [owner.ids for owner in step]
        assert tables.tensor[tables.padding_seat].eq(0).all()


def test_a_table_of_another_version_is_sent_as_a_whole() -> None:
    tables, owner = BlockTables(1, 8, CPU), Owner(7, [1, 2, 3])
    assert rows_of(tables, [owner]) == [[1, 2, 3]]
    owner.ids, owner.version = [1, 9, 3], 2
    assert rows_of(tables, [owner]) == [[1, 9, 3]]


def test_equal_tables_are_told_apart() -> None:
    first, second = Owner(0, [1, 2]), Owner(1, [1, 2])
    tables = BlockTables(2, 8, CPU)
    assert rows_of(tables, [first, second]) == [[1, 2], [1, 2]]
    first.ids.append(3)
    second.ids.append(4)
    assert rows_of(tables, [second, first]) == [[1, 2, 4], [1, 2, 3]]


def test_what_could_not_be_sent_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, owner = BlockTables(1, 8, CPU), Owner(0, [1, 2, 3])

    def fail(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("paged_sdk.attention.block_tables.to_device", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            place(tables, [owner])
    assert rows_of(tables, [owner]) == [[1, 2, 3]]


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_what_has_not_changed_is_not_sent() -> None:
    owners = [Owner(0, [1, 2]), Owner(1, [3]), Owner(2, [4])]
    tables = BlockTables(3, 8, CPU)
    with Operations() as first:
        place(tables, owners)
    with Operations() as second:
        place(tables, owners[::-1])
    assert (first.count > 0, second.count) == (True, 0)


def test_more_rows_than_seats() -> None:
    with pytest.raises(AssertionError, match="2 tables, 1 seats"):
        place(BlockTables(1, 8, CPU), [Owner(0, [1]), Owner(1, [2])])

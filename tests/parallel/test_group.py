"""Ranks add up what they have, through torch.distributed and in memory that they share."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from paged_sdk.errors import EngineDeadError, ModelLoadError
from paged_sdk.kernels.native.library import load
from paged_sdk.kernels.native.ranks import SharedSum, make_shared_memory
from paged_sdk.parallel.group import Group, Message
from rank_threads import run_ranks


def numbers(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums(dtype: torch.dtype) -> None:
    sums = run_ranks(3, lambda group: group.sum_(numbers(group.rank, 7, dtype)))
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    expected = torch.stack([numbers(rank, 7, dtype) for rank in range(3)]).sum(0)
    assert torch.allclose(sums[0], expected, rtol=2e-2, atol=2e-2)


def test_messages_of_any_length() -> None:
    messages: list[Message] = [("step", [1, 2, (3, None, "four")]), ("bytes", b"x" * 100_000), ("end",)]

    def run(group: Group) -> list[Message]:
        for message in messages if group.rank == 0 else ():
            group.send_message(message)
        return messages if group.rank == 0 else [group.receive_message() for _ in messages]

    assert run_ranks(2, run) == [messages, messages]


def test_the_smallest_number() -> None:
    assert run_ranks(3, lambda group: group.smallest(group.rank != 1)) == [0, 0, 0]


def test_columns_and_what_the_first_rank_has() -> None:
    def run(group: Group) -> tuple[Tensor, Tensor]:
        own = torch.full((2, 3 - group.rank), float(group.rank))
        return group.gather(own, [3, 2, 1]), group.broadcast(torch.tensor([group.rank, 7]))

    for joined, passed in run_ranks(3, run):
        assert joined.tolist() == [[0.0, 0.0, 0.0, 1.0, 1.0, 2.0]] * 2
        assert passed.tolist() == [0, 7]


def test_what_was_computed_while_a_rank_ended_is_not_used() -> None:
    def run(group: Group) -> None:
        group.check()
        group.end()
        with pytest.raises(EngineDeadError, match="another rank has ended"):
            group.check()

    run_ranks(2, run)


def test_the_first_error_of_any_rank() -> None:
    def run(group: Group, failing: set[int]) -> Exception | None:
        return group.first_error(ValueError(f"of {group.rank}") if group.rank in failing else None)

    assert run_ranks(3, lambda group: run(group, set())) == [None, None, None]
    one, two, three = run_ranks(3, lambda group: run(group, {1, 2}))
    assert isinstance(one, ModelLoadError)
    assert str(one) == "rank 1 of 3 could not do its part: ValueError: of 1"
    assert isinstance(two, ValueError)
    assert isinstance(three, ValueError)


def test_another_rank_that_leaves_is_an_error() -> None:
    def run(group: Group) -> None:
        if group.rank == 1:
            return  # and leave
        with pytest.raises(EngineDeadError, match="another rank has ended"):
            group.sum_(torch.ones(2, dtype=torch.float64))

    run_ranks(2, run)


def shared_sums(size: int) -> list[SharedSum]:
    library = load()
    file = None if library is None else make_shared_memory(library, size)
    if library is None or file is None:
        pytest.skip("no native library, or no memory without a name")
    try:
        return [SharedSum(library, file, rank=rank, size=size) for rank in range(size)]
    finally:
        os.close(file)


def test_sums_in_shared_memory() -> None:
    counts = (1, 17, 64 * 1024, 64 * 1024 + 1, 200_000, 3)

    def run(shared: SharedSum, rank: int) -> list[Tensor]:
        made = [numbers(10 * at + rank, count) for at, count in enumerate(counts)]
        for each in made:
            shared.add_(each)
        return made

    with ThreadPoolExecutor(3) as pool:
        sums = list(pool.map(run, shared_sums(3), range(3)))
    for at, count in enumerate(counts):
        first, second, third = (numbers(10 * at + rank, count) for rank in range(3))
        for of_rank in sums:
            assert torch.equal(of_rank[at], first + second + third)


def test_nobody_waits_in_shared_memory_for_a_rank_that_has_ended() -> None:
    first, second = shared_sums(2)
    waiting = threading.Thread(target=first.add_, args=(torch.ones(4),))
    waiting.start()
    assert not first.has_failed
    second.end()
    waiting.join(60)
    assert not waiting.is_alive()
    assert first.has_failed


def test_what_fails_on_one_rank_ends_the_others() -> None:
    library = load()
    file = None if library is None else make_shared_memory(library, 3)
    if library is None or file is None:
        pytest.skip("no native library, or no memory without a name")

    def run(group: Group) -> Tensor:
        group.share(library, file)
        if group.rank == 1:
            raise ValueError("of 1")
        return group.sum_(torch.ones(4))

    with pytest.raises(ValueError, match="of 1"):
        run_ranks(3, run)
    os.close(file)


def test_columns_are_gathered_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_sdk.kernels.native.ranks._BOARD", 1024)
    widths = (7, 300, 5)
    parts = [torch.randn(11, width, generator=torch.Generator().manual_seed(width)) for width in widths]
    with ThreadPoolExecutor(3) as pool:  # three rows at a time
        gathered = list(pool.map(lambda shared, part: shared.gather(part, widths), shared_sums(3), parts))
    assert gathered[0] is not None
    assert torch.equal(gathered[0], torch.cat(parts, 1))
    assert gathered[1:] == [None, None]


@pytest.mark.parametrize("capacity", [64, 1000, 4096])  # pieces of a row, some rows, all
def test_columns_are_joined_for_all_ranks(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_sdk.kernels.native.ranks._CAPACITY", capacity)
    widths = (70, 200, 5)
    parts = [numbers(width, 11 * 2 * width).view(11, 2 * width)[:, :width] for width in widths]
    with ThreadPoolExecutor(3) as pool:
        joined = list(
            pool.map(
                lambda shared, part: shared.join(part, torch.tensor(widths, dtype=torch.int32)), shared_sums(3), parts
            )
        )
    assert all(torch.equal(each, torch.cat(parts, 1)) for each in joined)


def test_messages_through_pipes() -> None:
    from_first, to_second = os.pipe()
    first, second = Group(0, 2), Group(1, 2)
    first.use_pipes([to_second])
    second.use_pipes([from_first])
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(lambda: [second.receive_message(), second.receive_message()])
        first.send_message(("bytes", b"x" * 300_000))
        first.send_message(("end",))
        assert heard.result() == [("bytes", b"x" * 300_000), ("end",)]
    os.close(to_second)
    with pytest.raises(EngineDeadError, match="no more messages"):
        second.receive_message()
    os.close(from_first)
    with pytest.raises(EngineDeadError, match="cannot be sent"):
        first.send_message(("end",))

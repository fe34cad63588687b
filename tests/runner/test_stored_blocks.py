"""Blocks are written and read beside the engine; a disk's failures do not reach it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from paged_sdk.errors import EngineError
from paged_sdk.kv.manager import StoredBlock
from paged_sdk.runner import stored_blocks
from paged_sdk.runner.block_content import BlockContent
from paged_sdk.runner.block_files import BlockFiles
from paged_sdk.runner.stored_blocks import StoredBlocks

NUM_BLOCKS = 8


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def new_pool() -> list[torch.Tensor]:
    return [torch.arange(NUM_BLOCKS * 6, dtype=torch.float32).view(NUM_BLOCKS, 6) for _ in range(2)]


class Rig:
    """Holds blocks whose threads run, and a pool."""

    def __init__(self, directory: Path) -> None:
        self.pool = new_pool()
        self.files = BlockFiles(directory, "a" * 32, max_bytes=1 << 30)
        self.blocks = StoredBlocks(self.files, BlockContent(self.pool))
        self.blocks.on_ready = self.note_ready
        self.ready = threading.Semaphore(0)
        self.blocks.start()

    def note_ready(self) -> None:
        self.ready.release()

    def store(self, *numbers: int) -> None:
        self.blocks.store([StoredBlock(number, digest(number)) for number in numbers])

    def read(self, *numbers: int) -> list[int]:
        """Read blocks, and return those that came."""
        self.blocks.read([digest(number) for number in numbers])
        assert self.ready.acquire(timeout=60)
        (found,) = self.blocks.take_ready()
        return sorted(int.from_bytes(each, "big") for each in found)

    def restore(self, **places: int) -> None:
        self.blocks.restore([StoredBlock(place, digest(int(name[1:]))) for name, place in places.items()])

    def hold_writes(self, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
        """Return an event that is set once a write has begun, and one without which none ends."""
        entered, leave = threading.Event(), threading.Event()
        write = self.files.write

        def held(digest: bytes, pieces: Sequence[memoryview]) -> None:
            entered.set()
            assert leave.wait(60)
            write(digest, pieces)

        monkeypatch.setattr(self.files, "write", held)
        return entered, leave

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, "it does not come to be"
            time.sleep(0.002)

    def until_written(self, *numbers: int) -> None:
        self.until(lambda: all(self.files.has(digest(number)) for number in numbers))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    own = Rig(tmp_path)
    yield own
    own.blocks.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("paged-sdk block")]


def test_blocks_are_written_and_read_back(rig: Rig) -> None:
    rig.store(2, 3)
    rig.store(3, 5)
    rig.until_written(2, 3, 5)
    for tensor in rig.pool:
        tensor.zero_()
    assert not rig.blocks.has_ready
    assert rig.read(2, 3, 5, 7) == [2, 3, 5]
    rig.restore(_2=0, _5=7)
    for tensor, fresh in zip(rig.pool, new_pool(), strict=True):
        assert torch.equal(tensor[0], fresh[2])
        assert torch.equal(tensor[7], fresh[5])
        assert not tensor[1:7].any()


def test_reading_ends_at_the_first_block_that_is_missing(rig: Rig) -> None:
    rig.store(1, 3)
    rig.until_written(1, 3)
    assert rig.read(1, 2, 3) == [1]
    assert rig.read(2, 3) == []


def test_a_call_reads_a_limited_part(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.store(1, 2, 3)
    rig.until_written(1, 2, 3)
    monkeypatch.setattr(stored_blocks, "_MOST_PER_READ", 100)
    assert rig.read(1, 2, 3) == [1, 2]


def test_reading_waits_while_what_was_read_is_not_used(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.store(1, 2)
    rig.until_written(1, 2)
    monkeypatch.setattr(stored_blocks, "_MOST_UNUSED", 0)
    assert rig.read(1) == [1]
    rig.blocks.read([digest(2)])
    assert not rig.ready.acquire(timeout=0.1)
    rig.restore(_1=1)
    assert rig.ready.acquire(timeout=60)


def test_what_is_too_much_at_once_is_left_out(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_blocks, "_MOST_UNWRITTEN", 50)
    entered, leave = rig.hold_writes(monkeypatch)
    rig.store(1)
    assert entered.wait(60)
    rig.store(2)
    leave.set()
    rig.until_written(1)
    rig.until(lambda: not rig.blocks._num_unwritten)
    rig.store(3)
    rig.until_written(3)
    assert not rig.files.has(digest(2))


def test_after_a_refusal_nothing_is_written_for_a_while(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(digest: bytes, pieces: Sequence[memoryview]) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rig.files, "write", full)
        rig.store(1, 2)
        rig.until(lambda: not rig.blocks._num_unwritten)
    rig.store(3)
    assert not rig.blocks._num_unwritten
    assert [record.getMessage() for record in caplog.records] == [
        "KV blocks cannot be stored: No space left on device. It is tried again in 60 s."
    ]
    rig.blocks._paused_until = 0.0
    rig.store(3)
    rig.until_written(3)


def test_an_unexpected_error_ends_storing_not_the_thread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> bool:
        raise ValueError("broken")

    rig.store(1)
    rig.until_written(1)
    with monkeypatch.context() as patch:
        patch.setattr(rig.files, "read", broken)
        assert rig.read(1) == []
        patch.setattr(rig.files, "write", broken)
        rig.store(2)
        rig.until(lambda: not rig.blocks._num_unwritten)
    assert rig.read(1) == [1]
    rig.store(2)
    assert not rig.blocks._num_unwritten
    assert len(caplog.records) == 2


def test_wrong_blocks_are_forgotten_even_while_they_are_written(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.store(1)
    rig.until_written(1)
    entered, leave = rig.hold_writes(monkeypatch)
    rig.store(2, 3, 4)
    assert entered.wait(60)
    rig.blocks.forget([digest(1), digest(2), digest(3)])
    leave.set()
    rig.until_written(4)
    rig.until(lambda: not rig.blocks._num_unwritten)
    assert [number for number in range(5) if rig.files.has(digest(number))] == [4]


def test_right_content_is_written_after_wrong_one_was_forgotten(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = rig.hold_writes(monkeypatch)
    for tensor in rig.pool:
        tensor[1:3].fill_(torch.nan)
    rig.store(1, 2)
    assert entered.wait(60)
    rig.blocks.forget([digest(1), digest(2)])
    for tensor, fresh in zip(rig.pool, new_pool(), strict=True):
        tensor.copy_(fresh)
    rig.store(1, 2)
    leave.set()
    rig.until(lambda: not rig.blocks._num_unwritten)
    assert rig.read(1, 2) == [1, 2]
    rig.restore(_1=6, _2=7)
    for tensor in rig.pool:
        assert torch.equal(tensor[6:8], tensor[1:3])


def test_what_was_read_of_forgotten_blocks_is_dropped(rig: Rig) -> None:
    rig.store(1)
    rig.until_written(1)
    rig.blocks.read([digest(1)])
    assert rig.ready.acquire(timeout=60)
    rig.blocks.forget([digest(1)])
    assert rig.blocks.take_ready() == [{}]


class SilentDisk:
    """Replaces the reading of files, which then does not return until it is told to."""

    def __init__(self, own: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        self.read = own.files.read
        monkeypatch.setattr(stored_blocks, "_MOST_SECONDS", 0.05)
        monkeypatch.setattr(own.files, "read", self.silent)

    def silent(self, digest: bytes, pieces: Sequence[memoryview]) -> bool:
        self.entered.set()
        assert self.leave.wait(60)
        return self.read(digest, pieces)


def test_a_disk_that_does_not_answer_is_given_up_until_it_does(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig.store(1, 2)
    rig.until_written(1, 2)
    disk = SilentDisk(rig, monkeypatch)
    rig.blocks.read([digest(1)])
    rig.blocks.read([digest(2)])
    assert disk.entered.wait(60)
    assert not rig.blocks.has_ready
    assert rig.blocks.take_ready() == []
    rig.until(lambda: rig.blocks.has_ready)
    assert rig.blocks.take_ready() == [{}, {}]
    assert len(caplog.records) == 1
    assert not rig.blocks.has(digest(1))
    assert not rig.blocks.has_ready
    disk.leave.set()
    rig.until(lambda: rig.blocks.has(digest(1)))
    assert rig.read(1, 2) == [1, 2]  # the late answer does not come instead
    rig.restore()
    assert rig.blocks._num_unused == 0


def test_a_disk_that_is_stuck_in_writing_is_not_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.store(1)
    rig.until_written(1)
    leave = threading.Event()
    monkeypatch.setattr(stored_blocks, "_MOST_SECONDS", 0.05)
    monkeypatch.setattr(rig.files, "write", lambda digest, pieces: leave.wait(60))
    rig.store(2)
    rig.until(lambda: not rig.blocks.has(digest(1)))
    leave.set()
    rig.until(lambda: rig.blocks.has(digest(1)))


@pytest.mark.parametrize("way", ["clear", "replace"])
def test_nothing_comes_of_what_was_read_before(rig: Rig, way: str, tmp_path: Path) -> None:
    rig.store(1, 2)
    rig.until_written(1, 2)
    rig.blocks.read([digest(1)])
    assert rig.ready.acquire(timeout=60)
    if way == "clear":
        rig.blocks.clear()
        assert not rig.files.has(digest(1))
    else:
        rig.blocks.let_go_of_pool()
        rig.store(3)  # nobody knows what the pool holds now
        rig.blocks.replace(BlockFiles(tmp_path, "b" * 32, max_bytes=1 << 30), BlockContent(new_pool()))
        assert rig.files.has(digest(1))
        assert not rig.blocks.has(digest(1))
    assert rig.blocks.take_ready() == [{}]
    assert rig.blocks._num_unused == 0
    rig.store(4)
    rig.until(lambda: rig.blocks.has(digest(4)))
    assert not rig.files.has(digest(3))


def test_what_waits_is_written_before_the_pool_is_replaced(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = rig.hold_writes(monkeypatch)
    rig.store(1, 2)
    assert entered.wait(60)
    letting_go = threading.Thread(target=rig.blocks.let_go_of_pool)
    letting_go.start()
    letting_go.join(0.05)
    assert letting_go.is_alive()
    leave.set()
    letting_go.join(60)
    assert rig.files.has(digest(1))
    assert rig.files.has(digest(2))


def test_a_pool_is_replaced_though_the_disk_does_not_answer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_blocks, "_CLOSE_SECONDS", 0.05)
    entered, leave = rig.hold_writes(monkeypatch)
    rig.store(1, 2)
    assert entered.wait(60)
    rig.blocks.let_go_of_pool()
    monkeypatch.undo()
    leave.set()
    rig.until(lambda: not rig.blocks._num_unwritten)
    assert not rig.files.has(digest(2))


def test_closing_writes_what_waits(tmp_path: Path) -> None:
    own = Rig(tmp_path)
    own.store(*range(NUM_BLOCKS))
    own.blocks.close()
    own.blocks.close()
    assert all(own.files.has(digest(number)) for number in range(NUM_BLOCKS))


def test_closing_does_not_wait_for_a_disk_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, leave = Rig(tmp_path), threading.Event()
    monkeypatch.setattr(stored_blocks, "_CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(own.files, "write", lambda digest, pieces: leave.wait(60))
    own.store(1)
    start = time.monotonic()
    own.blocks.close()
    assert time.monotonic() - start < 30
    leave.set()
    own.blocks._writer.join(60)


def test_closing_after_one_thread_could_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = StoredBlocks(BlockFiles(tmp_path, "a" * 32, max_bytes=1 << 30), BlockContent(new_pool()))

    def refuse() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(blocks._writer, "start", refuse)
    with pytest.raises(EngineError):
        blocks.start()
    blocks.close()
    assert not blocks._reader.is_alive()


def test_closing_before_the_start_does_nothing(tmp_path: Path) -> None:
    blocks = StoredBlocks(BlockFiles(tmp_path, "a" * 32, max_bytes=1 << 30), BlockContent(new_pool()))
    blocks.close()

"""Files of blocks: what was written is read, whatever is damaged is not, and the directory has a size."""

from __future__ import annotations

import os
import random
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_sdk.errors import ConfigError
from paged_sdk.runner.block_files import BlockFiles

SIZES = (96, 32, 8)
HEADER = 20


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> list[bytes]:
    return [random.Random(number * 10 + place).randbytes(size) for place, size in enumerate(SIZES)]


def views(pieces: list[bytes]) -> list[memoryview]:
    return [memoryview(piece) for piece in pieces]


def files(directory: Path, *, identity: str = "a" * 32, max_bytes: int = 1 << 20) -> BlockFiles:
    return BlockFiles(directory, identity, max_bytes=max_bytes)


def read(own: BlockFiles, number: int, sizes: tuple[int, ...] = SIZES) -> list[bytes] | None:
    pieces = [bytearray(size) for size in sizes]
    found = own.read(digest(number), [memoryview(piece) for piece in pieces])
    return [bytes(piece) for piece in pieces] if found else None


def paths(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_what_is_written_is_read_by_the_next_process(tmp_path: Path) -> None:
    own = files(tmp_path / "new" / "directory")
    for number in range(3):
        assert not own.has(digest(number))
        own.write(digest(number), views(content(number)))
    again = files(tmp_path / "new" / "directory")
    assert [again.has(digest(number)) for number in range(4)] == [True, True, True, False]
    assert [read(again, number) for number in range(4)] == [content(0), content(1), content(2), None]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in paths(tmp_path)}
    assert modes == {0o600}
    assert stat.S_IMODE((tmp_path / "new" / "directory" / f"paged-kv-{'a' * 32}").stat().st_mode) == 0o700


def test_models_do_not_read_each_others_blocks(tmp_path: Path) -> None:
    files(tmp_path).write(digest(1), views(content(1)))
    other = files(tmp_path, identity="b" * 32)
    assert not other.has(digest(1))
    assert read(other, 1) is None
    other.clear()
    assert read(files(tmp_path), 1) == content(1)
    files(tmp_path).clear()
    assert paths(tmp_path) == []


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    own = files(tmp_path)
    own.write(digest(1), views(content(1)))
    own.write(digest(1), views(content(2)))
    assert read(own, 1) == content(1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"0",
        lambda data: b"",
        lambda data: data[:5],
        lambda data: bytes(len(data)),
        lambda data: data[:HEADER] + bytes(len(data) - HEADER),
        lambda data: b"x" + data[1:],
    ],
    ids=["cut", "longer", "empty", "header cut", "zeros", "content lost", "magic"],
)
def test_a_damaged_file_is_removed(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    own = files(tmp_path)
    own.write(digest(1), views(content(1)))
    (path,) = paths(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert read(own, 1) is None
    assert not own.has(digest(1))
    own.write(digest(1), views(content(1)))
    assert read(own, 1) == content(1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(place=st.integers(0, HEADER + sum(SIZES) - 1), bit=st.integers(0, 7))
def test_every_flipped_bit_shows(tmp_path_factory: pytest.TempPathFactory, place: int, bit: int) -> None:
    directory = tmp_path_factory.mktemp("files")
    own = files(directory)
    own.write(digest(1), views(content(1)))
    (path,) = paths(directory)
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)
    assert read(own, 1) is None


def test_a_block_of_another_shape_is_not_read(tmp_path: Path) -> None:
    own = files(tmp_path)
    own.write(digest(1), views(content(1)))
    assert read(own, 1, (96, 32)) is None


def test_the_files_that_were_unused_for_longest_go_first(tmp_path: Path) -> None:
    size = HEADER + sum(SIZES)
    own = files(tmp_path, max_bytes=10 * size)
    for number in range(10):
        own.write(digest(number), views(content(number)))
        (path,) = [path for path in paths(tmp_path) if path.name.startswith(digest(number).hex())]
        os.utime(path, (number, number))
    assert read(own, 0) == content(0)  # a read counts as use
    own.write(digest(10), views(content(10)))
    assert [number for number in range(11) if own.has(digest(number))] == [0, 3, 4, 5, 6, 7, 8, 9, 10]


def test_other_models_files_count(tmp_path: Path) -> None:
    size = HEADER + sum(SIZES)
    other = files(tmp_path, identity="b" * 32)
    for number in range(8):
        other.write(digest(number), views(content(number)))
    own = files(tmp_path, max_bytes=4 * size)
    own.write(digest(9), views(content(9)))
    assert sum(path.stat().st_size for path in paths(tmp_path)) <= 4 * size
    assert own.has(digest(9))


def test_several_processes_keep_to_one_size(tmp_path: Path) -> None:
    size = HEADER + sum(SIZES)
    several = [files(tmp_path, identity=letter * 32, max_bytes=64 * size) for letter in "abcd"]
    most = 0
    for number in range(100):
        for own in several:
            own.write(digest(number), views(content(number)))
        most = max(most, sum(path.stat().st_size for path in paths(tmp_path)))
    assert most <= (64 + 4 * 4) * size


def test_another_process_may_hold_the_file_that_is_to_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows refuses then. The other process has written the same."""
    own, replace = files(tmp_path), os.replace

    def refused(source: Path, target: Path) -> None:
        replace(source, target)
        source.write_bytes(b"")
        raise PermissionError(13, "Access is denied")

    monkeypatch.setattr(os, "replace", refused)
    own.write(digest(1), views(content(1)))
    assert len(paths(tmp_path)) == 1
    assert read(own, 1) == content(1)


def test_what_was_read_counts_even_if_it_is_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = files(tmp_path)
    own.write(digest(1), views(content(1)))

    def gone(path: Path) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "utime", gone)
    assert read(own, 1) == content(1)


def test_nothing_else_in_the_directory_is_touched(tmp_path: Path) -> None:
    others = [tmp_path / "a.kv", tmp_path / "data" / "00" / "b.kv", tmp_path / "c.part", tmp_path / "ab" / "letter"]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (0, 0))
    own = files(tmp_path, max_bytes=1)
    own.write(digest(1), views(content(1)))
    own.trim()
    own.clear()
    assert all(path.exists() for path in others)


def test_files_that_were_never_finished_are_removed_after_a_while(tmp_path: Path) -> None:
    own = files(tmp_path)
    own.write(digest(1), views(content(1)))
    (path,) = paths(tmp_path)
    old, new = path.with_name("old.part"), path.with_name("new.part")
    old.write_bytes(b"1")
    new.write_bytes(b"1")
    os.utime(old, (time.time() - 7200,) * 2)
    own.trim()
    assert paths(tmp_path) == sorted([path, new])


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = files(tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space"):
        own.write(digest(1), views(content(1)))
    assert paths(tmp_path) == []


def test_without_vectored_calls_the_files_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = files(tmp_path)
    own.write(digest(1), views(content(1)))
    monkeypatch.delattr(os, "writev")
    monkeypatch.delattr(os, "readv")
    assert read(own, 1) == content(1)
    own.write(digest(2), views(content(2)))
    monkeypatch.undo()
    assert read(own, 2) == content(2)


def test_many_threads_write_and_read(tmp_path: Path) -> None:
    own = [files(tmp_path, max_bytes=40 * (HEADER + sum(SIZES))) for _ in range(4)]

    def work(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(200):
            number = generator.randrange(60)
            mine = own[seed % 4]
            if generator.random() < 0.5:
                mine.write(digest(number), views(content(number)))
            else:
                assert read(mine, number) in (None, content(number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


@pytest.mark.parametrize("kind", ["a file", "below a file", "null"])
def test_a_directory_that_cannot_be_used_is_named(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("")
    directory = {"a file": place, "below a file": place / "below", "null": tmp_path / "a\0b"}[kind]
    with pytest.raises(ConfigError, match=r"with_prefix_cache_dir.*a directory to write to"):
        files(directory)

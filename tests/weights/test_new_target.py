"""Targets appear complete or not at all, whatever interrupts the writing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paged_sdk.errors import CheckpointError, ConfigError
from paged_sdk.weights.new_target import new_directory, new_file


class Disk:
    """Records which files and directories are written to the disk, and when the target gets its name.

    :ivar events: the inodes that were synchronized, and "named", in order
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[int | str] = []
        fsync, replace = os.fsync, os.replace

        def note_sync(descriptor: int) -> None:
            self.events.append(os.fstat(descriptor).st_ino)
            fsync(descriptor)

        def note_name(source: Path, target: Path) -> None:
            self.events.append("named")
            replace(source, target)

        monkeypatch.setattr(os, "fsync", note_sync)
        monkeypatch.setattr(os, "replace", note_name)

    def check(self, target: Path) -> None:
        """Check that all of the target was written before it was named, and then its name."""
        named = self.events.index("named")
        assert set(self.events[:named]) == {path.stat().st_ino for path in (target, *target.rglob("*"))}
        assert self.events[named + 1 :] == [target.parent.stat().st_ino]


def test_a_file_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with new_file(tmp_path / "model.gguf", 0) as part:
        part.write_text("weights")
    disk.check(tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_directory_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with new_directory(tmp_path / "model", 0) as part:
        (part / "1_Pooling").mkdir()
        for name in ("config.json", "model.safetensors", "1_Pooling/config.json"):
            (part / name).write_text(name)
    disk.check(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_nothing_is_left_of_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    target = tmp_path / "model"
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"), new_directory(target, 0) as part:
        (part / "config.json").touch()
    with pytest.raises(CheckpointError, match="No space left"), new_file(target, 0) as part:
        part.touch()
    with pytest.raises(CheckpointError, match="are free"), new_file(target, 1 << 60):
        raise AssertionError("the block does not begin")
    assert not [*tmp_path.iterdir()]


def test_what_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    with pytest.raises(ConfigError, match="where nothing is yet"), new_file(target, 0):
        target.write_text("another's")
    assert target.read_text() == "another's"
    assert [*tmp_path.iterdir()] == [target]

"""Create files and directories atomically: write beside the target, and rename once complete."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from paged_sdk.errors import CheckpointError, ConfigError

__all__ = ["must_be_new", "new_directory", "new_file"]

_ROOM_FOR_METADATA: Final = 1 << 25
_ROOM_FOR_OTHER_FILES: Final = 1 << 26  # the tokenizer and the rest


@contextmanager
def new_file(target: Path, num_bytes: int, *, setting: str = "target", replaces: bool = False) -> Iterator[Path]:
    """Yield a temporary path for the block to write to. The file becomes ``target`` when the block ends, and is deleted
    if the block raises.

    :param num_bytes: how many bytes of tensors the file will hold
    :param setting: the user's name of the target's setting, for errors
    :param replaces: whether the target may be a file already, which the new one replaces
    :raises ConfigError: the target exists, or its directory does not
    :raises CheckpointError: there is too little disk space, or the file cannot be written
    """
    part = _beside(target)
    try:
        with _becoming(target, part, num_bytes + _ROOM_FOR_METADATA, setting, replaces=replaces):
            yield part
    finally:
        with suppress(FileNotFoundError, NotADirectoryError):
            part.unlink()


@contextmanager
def new_directory(target: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a new temporary directory, which becomes ``target`` when the block ends, and is deleted if the block
    raises. Parameters and errors are those of :func:`new_file`.
    """
    part = _beside(target)
    try:
        with _becoming(target, part, num_bytes + _ROOM_FOR_OTHER_FILES, "target"):
            part.mkdir()
            yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def must_be_new(target: Path, *, setting: str = "target", replaces: bool = False) -> None:
    """Check that a target does not exist but its directory does.

    :param replaces: whether it may be a file
    :raises ConfigError: the target exists, or its directory does not
    """
    if os.path.lexists(target) and not (replaces and target.is_file()):
        allowed = "a path of a file, or where nothing is yet" if replaces else "a path where nothing is yet"
        raise ConfigError.of(setting, str(target), allowed)
    if not target.parent.is_dir():
        raise ConfigError.of(setting, str(target), "a path in a directory that exists")


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.part")


@contextmanager
def _becoming(target: Path, part: Path, num_bytes: int, setting: str, *, replaces: bool = False) -> Iterator[None]:
    """Rename ``part`` to ``target`` after the block; unless the target may be replaced, it must not exist before the
    block, nor after it.

    Everything is on the disk before the new name is: otherwise a power failure could leave a complete-looking target
    with empty files.
    """
    must_be_new(target, setting=setting, replaces=replaces)
    try:
        free = shutil.disk_usage(target.parent).free
        if free < num_bytes:
            needed, there = (math.ceil(each / 2**20) for each in (num_bytes, free))
            raise CheckpointError(
                f"{target} cannot be written: it takes {needed} MiB, and {there} are free", path=target
            )
        yield
        must_be_new(target, setting=setting, replaces=replaces)
        for path in (*part.rglob("*"), part):
            _sync(path)
        os.replace(part, target)
        _sync(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}", path=target) from error


def _sync(path: Path) -> None:
    """Write a file's content, or a directory's names, to the disk."""
    if path.is_dir():
        with suppress(OSError):  # not every system can: Windows cannot open a directory
            _sync_opened(path)
    else:
        _sync_opened(path)


def _sync_opened(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows needs the right to write
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

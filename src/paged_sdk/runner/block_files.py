"""Keeps the content of KV blocks in files, one per block, under the block's hash.

A file has a header (magic, CRC-32 of the content, length of the content), then the content. It appears under its name
once it is whole. Files are not synchronized with the disk: what a power failure loses, the checksum reveals.

The files of each model lie in a subdirectory of their own. Any number of processes and models may use one directory.
"""

from __future__ import annotations

import io
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import uuid4
from zlib import crc32

from paged_sdk.errors import ConfigError
from paged_sdk.logs import get_logger

__all__ = ["BlockFiles"]

_log = get_logger(__name__)

_MAGIC: Final = b"paged-kv"
_HEADER: Final = struct.Struct("<8sIQ")
_OF_MODEL: Final = "paged-kv-"
_FINISHED: Final = ".kv"
_UNFINISHED: Final = ".part"
_STALE_SECONDS: Final = 3600.0
"""How old a file without its final name is when nobody can be writing it any more."""
_KEPT_SHARE: Final = 0.9
"""The share of the limit that remains after files were removed, so that this is not needed for each new block."""
_MEASURED_PER_SIZE: Final = 16
"""How often the directory is measured while one process writes as much as the limit: others may write to it, too."""
_MOST_PIECES: Final = 512
"""Pieces of memory that one call reads or writes; Linux allows 1,024."""


class BlockFiles:
    """Reads and writes the files of one model's blocks, and bounds the size of the whole directory.

    Thread-safe. The methods raise OSError where they say so; a missing or damaged file is no error.

    :param directory: the directory that models share
    :param identity: a hash of everything that KV depends on, besides what the blocks' hashes are of
    :param max_bytes: the size of the directory from which on the files that were unused for longest are removed
    :param setting: what named the directory, for errors
    :raises ConfigError: the directory cannot be made or written to
    """

    def __init__(
        self, directory: Path, identity: str, *, max_bytes: int, setting: str = "with_prefix_cache_dir"
    ) -> None:
        self._directory = directory
        self._own = directory / (_OF_MODEL + identity)
        self._max_bytes = max_bytes
        self._num_left = 0  # bytes to write before the directory is measured again
        try:
            self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self._own / (uuid4().hex + _UNFINISHED)
            os.close(_new_file(probe))
            probe.unlink()
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            allowed = f"a directory to write to ({reason})"
            raise ConfigError.of(setting, str(directory), allowed) from error

    def has(self, digest: bytes) -> bool:
        """Return whether there is a file for a block."""
        return os.access(self._path(digest), os.R_OK)

    def read(self, digest: bytes, pieces: Sequence[memoryview]) -> bool:
        """Read a block's content into memory; return False if there is none or it is damaged, and then remove it."""
        path = self._path(digest)
        try:
            with io.FileIO(path) as file:
                header = file.read(_HEADER.size)
                length = sum(map(len, pieces))
                is_whole = len(header) == _HEADER.size and os.fstat(file.fileno()).st_size == _HEADER.size + length
                if is_whole:
                    magic, checksum, said = _HEADER.unpack(header)
                    is_whole = (magic, said) == (_MAGIC, length) and _read_into(file, pieces)
                    is_whole = is_whole and _checksum(pieces) == checksum
            if is_whole:
                with suppress(OSError):  # removed by another process meanwhile
                    os.utime(path)
                return True
        except OSError:
            return False
        _log.warning("%s is damaged: it is removed.", path)
        with suppress(OSError):
            path.unlink()
        return False

    def write(self, digest: bytes, pieces: Sequence[memoryview]) -> None:
        """Write a block's content, unless there is a file for it.

        :raises OSError: the system refuses
        """
        path = self._path(digest)
        if path.exists():
            return
        size = _HEADER.size + sum(map(len, pieces))
        if self._num_left < size:
            self.trim()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{uuid4().hex}{_UNFINISHED}")
        header = _HEADER.pack(_MAGIC, _checksum(pieces), sum(map(len, pieces)))
        try:
            with io.FileIO(_new_file(unfinished), "w") as file:
                _write_all(file, [memoryview(header), *pieces])
            os.replace(unfinished, path)
        except BaseException as error:
            with suppress(OSError):
                unfinished.unlink()
            # Windows replaces no file that another process reads. It was written meanwhile, and holds the same.
            if not (isinstance(error, PermissionError) and path.exists()):
                raise
        self._num_left -= size
        if self._num_left < 0:
            self.trim()

    def trim(self) -> None:
        """Measure the directory. If it exceeds its limit, remove the files that were unused for longest."""
        found = sorted(file for model in _entries(self._directory, _OF_MODEL) for file in _files(model))
        total = sum(size for _, size, _ in found)
        stale = time.time() - _STALE_SECONDS
        goal = self._max_bytes * _KEPT_SHARE if total > self._max_bytes else self._max_bytes
        for used_at, size, path in found:
            if used_at < stale if path.endswith(_UNFINISHED) else total > goal:
                with suppress(OSError):
                    os.unlink(path)
                    total -= size
        self._num_left = min(self._max_bytes - total, self._max_bytes // _MEASURED_PER_SIZE)

    def remove(self, digest: bytes) -> None:
        """Remove a block's file, if there is one."""
        with suppress(OSError):
            self._path(digest).unlink()

    def clear(self) -> None:
        """Remove the files of this model's blocks."""
        for _, _, path in _files(self._own):
            if path.endswith(_FINISHED):
                with suppress(OSError):
                    os.unlink(path)

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._own / name[:2] / (name + _FINISHED)


def _files(model: str | Path) -> Iterator[tuple[float, int, str]]:
    """Yield the files of one model's blocks: when each was used last, its size and its path. Nothing else in the
    directory is touched, as it may be one that holds other things, too.
    """
    for part in _entries(model, ""):
        for path in _entries(part, ""):
            if path.endswith((_FINISHED, _UNFINISHED)):
                with suppress(OSError):  # removed by another process meanwhile
                    status = os.stat(path, follow_symlinks=False)
                    yield status.st_mtime, status.st_size, path


def _entries(directory: str | Path, prefix: str) -> list[str]:
    """Return the paths of a directory's entries whose names have a prefix; none, if it is not a directory."""
    try:
        return [os.path.join(directory, name) for name in os.listdir(directory) if name.startswith(prefix)]
    except OSError:
        return []


def _new_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)


def _checksum(pieces: Sequence[memoryview]) -> int:
    value = 0
    for piece in pieces:
        value = crc32(piece, value)
    return value


def _read_into(file: io.FileIO, pieces: Sequence[memoryview]) -> bool:
    """Fill pieces of memory from the file's position on; return whether the file was long enough."""
    left = list(pieces)
    while left:
        # Windows has no readv. Without it, the GIL is taken again for each piece.
        count = os.readv(file.fileno(), left[:_MOST_PIECES]) if hasattr(os, "readv") else file.readinto(left[0])
        if not count:
            return False
        _advance(left, count)
    return True


def _write_all(file: io.FileIO, pieces: Sequence[memoryview]) -> None:
    left = list(pieces)
    while left:
        count = os.writev(file.fileno(), left[:_MOST_PIECES]) if hasattr(os, "writev") else file.write(left[0])
        _advance(left, count)


def _advance(pieces: list[memoryview], count: int) -> None:
    """Drop the first ``count`` bytes of some pieces."""
    done = 0
    while done < len(pieces) and count >= len(pieces[done]):
        count -= len(pieces[done])
        done += 1
    del pieces[:done]
    if count:
        pieces[0] = pieces[0][count:]

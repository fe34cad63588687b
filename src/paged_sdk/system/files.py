"""Open and read the files of a checkpoint; errors are :class:`CheckpointError` with the file's name.

Files are untrusted: a pipe must not block loading for ever, nor a device fill the memory.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from paged_sdk.errors import CheckpointError

__all__ = ["CheckpointFile", "is_file", "open_file", "read_json", "read_json_if_there", "read_text"]

MAX_TEXT_BYTES: Final = 1 << 26
"""The size limit of text files: 64 MiB. The largest in use, Gemma's tokenizer.json, has 33 MiB."""

MAX_NAME: Final = 4096
"""The most characters of a path that an error quotes: the length limit of paths in Linux."""

_CHUNK_BYTES: Final = 1 << 20
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file, or a link to one; False for invalid names."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


class CheckpointFile:
    """Reads a file; the system's errors become :class:`CheckpointError` with the file's name.

    Reading may fail even if opening did not: on a failing disk, over a lost network, in /proc. Several threads may use
    :meth:`read_into` at once.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._file = io.FileIO(descriptor)
        self._lock = threading.Lock()

    def __enter__(self) -> CheckpointFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def stat(self) -> os.stat_result:
        """Return the file's current status."""
        with self._errors():
            return os.fstat(self._file.fileno())

    def read(self, num_bytes: int) -> bytes:
        """Read from the beginning of the file; return fewer bytes if the file is shorter."""
        parts, left = [], num_bytes
        with self._errors():
            self._file.seek(0)
            while left and (part := self._file.read(min(left, _CHUNK_BYTES))):
                parts.append(part)
                left -= len(part)
        return b"".join(parts)

    def read_into(self, offset: int, target: memoryview) -> int:
        """Read bytes from an offset into memory; return their number, less than requested at the end of the file."""
        done = 0
        with self._errors():
            while done < len(target) and (count := self._read_at(offset + done, target[done:])):
                done += count
        return done

    def _read_at(self, offset: int, target: memoryview) -> int:
        if hasattr(os, "preadv"):  # independent of the file position, which threads share
            return os.preadv(self._file.fileno(), [target], offset)
        with self._lock:
            self._file.seek(offset)
            return self._file.readinto(target) or 0

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._errors():
            self._file.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _refused(self._path, "read", error) from error


def open_file(path: Path) -> CheckpointFile:
    """Open a regular file for reading, without waiting: pipes, devices and directories are refused.

    :raises CheckpointError: the file does not exist, cannot be read, or is not a regular file
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte, or with a surrogate
        raise _refused(path, "opened", error) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path} cannot be opened: it is not a regular file", path=path)
        return CheckpointFile(path, descriptor)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise _refused(path, "opened", error) from error
        raise


def _refused(path: Path, what: str, error: OSError | ValueError) -> CheckpointError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    name = str(path) if str(path).isprintable() else ascii(str(path))
    return CheckpointError(f"{name[:MAX_NAME]} cannot be {what}: {reason}", path=path)


def read_text(path: Path) -> str:
    """Read a UTF-8 file of at most :data:`MAX_TEXT_BYTES`.

    :raises CheckpointError: the file is missing, cannot be read, is too long or is not UTF-8
    """
    with open_file(path) as file:
        size = file.stat().st_size
        if size > MAX_TEXT_BYTES:
            raise CheckpointError(
                f"{path} has {size} bytes: at most {MAX_TEXT_BYTES} bytes of text are read", path=path
            )
        data = file.read(MAX_TEXT_BYTES)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", path=path) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    :raises CheckpointError: the file cannot be read, is not a JSON object, or has a string with lone surrogates
    """
    text = read_text(path)
    try:
        content = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{path} has a string that is not Unicode: {error.reason}", path=path) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}", path=path) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}", path=path)
    return content


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; return an empty dict if the path does not exist.

    :raises CheckpointError: as :func:`read_json`
    """
    return read_json(path) if os.path.lexists(path) else {}

"""Open and read the files of a checkpoint; what is wrong with one raises a :class:`CheckpointError` that names it.

They come from outside: a pipe must not make a model wait for ever, nor a device fill the memory.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, Final

from paged_sdk.errors import CheckpointError

__all__ = ["is_file", "open_file", "read_json", "read_json_if_there", "read_text"]

MAX_TEXT_BYTES: Final = 1 << 26
"""The longest text that is read whole: 64 MiB. The largest in use, tokenizer.json of Gemma, has 33 MiB."""

_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


def is_file(path: Path) -> bool:
    """Return whether there is a regular file, or a link to one. A name that no file can have is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def open_file(path: Path) -> io.FileIO:
    """Open a regular file for reading, without waiting: pipes, devices and directories are refused.

    :raises CheckpointError: there is no such file, it cannot be read, or it is not a regular one
    """
    try:
        # Without O_NONBLOCK, to open a pipe is to wait for a writer.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        file = io.FileIO(os.open(path, flags), closefd=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror or error}", path=path) from error
    except ValueError as error:  # a name with a zero byte
        raise CheckpointError(f"{str(path)!r} cannot be opened: {error}", path=path) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{path} cannot be opened: it is not a regular file", path=path)
    return file


def read_text(path: Path) -> str:
    """Read a whole UTF-8 file of at most :data:`MAX_TEXT_BYTES`.

    :raises CheckpointError: it is missing, cannot be read, is too long or is not UTF-8
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_TEXT_BYTES:
                raise CheckpointError(
                    f"{path} has {size} bytes: at most {MAX_TEXT_BYTES} bytes of text are read", path=path
                )
            return file.read(MAX_TEXT_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", path=path) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    :raises CheckpointError: the file cannot be read, is no JSON, holds something else than an object, or a string of
        it is no Unicode (lone surrogates)
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
    """Read a file that holds one JSON object; without such a file, return an empty object.

    :raises CheckpointError: as :func:`read_json`, if there is anything of that name
    """
    return read_json(path) if os.path.lexists(path) else {}

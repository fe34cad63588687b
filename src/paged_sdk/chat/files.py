"""Read a checkpoint's small text files; an error in one raises a :class:`CheckpointError` that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paged_sdk.errors import CheckpointError


def read_text(path: Path) -> str:
    """Read a whole UTF-8 file.

    :raises CheckpointError: if it is missing, cannot be read or is not UTF-8
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", path=path) from None
    except (OSError, UnicodeDecodeError) as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}", path=path) from exc


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    :raises CheckpointError: if it is missing, malformed or holds something else
    """
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path} is not valid JSON: {exc}", path=path) from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}", path=path)
    return value


def read_json_object_if_there(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object; without such a file, return an empty object."""
    return read_json_object(path) if path.is_file() else {}

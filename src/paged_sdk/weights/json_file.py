"""Read the JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paged_sdk.errors import CheckpointError

__all__ = ["read_json"]


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    :raises CheckpointError: the file is missing, is no JSON, or holds something else than an object
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", path=path) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}", path=path) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not a JSON object", path=path)
    return content

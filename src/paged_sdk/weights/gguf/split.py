"""List the files of a split GGUF model."""

from __future__ import annotations

import re

__all__ = ["split_parts"]

_PART_NAME = re.compile(r"(.*)-\d{5}-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


def split_parts(name: str) -> list[str]:
    """List all files of the model that a file belongs to, in order: ``m-00002-of-00002.gguf`` is the second of two.

    :param name: the name or path of any part; any other name is the only file of its model
    """
    match = _PART_NAME.fullmatch(name)
    if match is None:
        return [name]
    stem, count, suffix = match.groups()
    return [f"{stem}-{part:05}-of-{count}{suffix}" for part in range(1, int(count) + 1)]

"""Refuses duplicate keys in files: parsers of JSON and YAML silently take the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["check_unique", "unique"]


def check_unique(keys: Sequence[str]) -> None:
    """Check that no key occurs twice.

    :raises ValueError: naming the first duplicate
    """
    twice = next((key for place, key in enumerate(keys) if key in keys[:place]), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice")


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; for use as ``object_pairs_hook`` of ``json.loads``.

    :raises ValueError: naming a duplicate key
    """
    check_unique([key for key, _ in pairs])
    return dict(pairs)

"""Refuse files in which a key is there twice: readers of JSON and YAML take the last one and say nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["check_unique", "unique"]


def check_unique(keys: Sequence[str]) -> None:
    """Check that no key is there twice.

    :raises ValueError: naming the first that is
    """
    twice = next((key for place, key in enumerate(keys) if key in keys[:place]), None)
    if twice is not None:
        raise ValueError(f"{twice} is there twice")


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, as the ``object_pairs_hook`` of a reader.

    :raises ValueError: naming a key that is there twice
    """
    check_unique([key for key, _ in pairs])
    return dict(pairs)

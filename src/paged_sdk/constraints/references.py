"""Resolves references within a JSON schema."""

from __future__ import annotations

from typing import Any

__all__ = ["target_of"]


def target_of(root: dict[str, Any], reference: object) -> object:
    """Return the schema that a reference within a document leads to; True, which allows everything, if not certain."""
    if not isinstance(reference, str) or not reference.startswith("#/") or "%" in reference:
        return True
    target: Any = root
    for name in reference[2:].split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, dict) or name not in target or (target is not root and "$id" in target):
            return True
        target = target[name]
    return target

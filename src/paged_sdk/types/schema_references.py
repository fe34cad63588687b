"""Resolves references within a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["resolve_reference"]


def resolve_reference(root: Mapping[str, Any], reference: object) -> Any:
    """Return the part of a schema document that a ``$ref`` leads to: ``"#"``, or a JSON pointer such as
    ``"#/$defs/a~1b"``.

    Pointers with percent-encoded characters, and those through a schema with a ``$id`` of its own, are not resolved:
    libraries differ on them.

    :param root: the document
    :raises LookupError: the reference cannot be resolved; says why
    """
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        raise LookupError(f"{reference!r} leads out of the schema")
    if "%" in reference:
        raise LookupError(f"{reference!r} has percent-encoded characters, which libraries read differently")
    target: Any = root
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or name not in target:
            raise LookupError(f"{reference!r} leads nowhere")
        if target is not root and "$id" in target:
            raise LookupError(f"{reference!r} leads through a schema with $id, which drafts read differently")
        target = target[name]
    return target

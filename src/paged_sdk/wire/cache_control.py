"""Describes the marks by which clients ask for a prefix to be cached."""

from __future__ import annotations

from typing import Annotated, Literal, Required, TypedDict

__all__ = ["CacheControl"]


class CacheControl(TypedDict, total=False):
    """Marks the end of a prefix to cache. It has no effect: every prefix is cached."""

    type: Required[Literal["ephemeral"]]
    ttl: Annotated[Literal["5m", "1h"] | None, "Has no effect: prefixes are kept while there is room."]

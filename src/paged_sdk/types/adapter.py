"""Name a loaded adapter, and say where one is."""

from __future__ import annotations

from attrs import frozen

__all__ = ["AdapterUse"]


@frozen
class AdapterUse:
    """Names the adapter that a request goes through.

    :ivar number: identifies it in its engine; no other one ever has the same
    :ivar name: what the caller calls it
    :ivar digest: of its content: KV that was computed with it is found by requests of any adapter with this content
    """

    number: int
    name: str
    digest: bytes

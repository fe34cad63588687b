"""Define the interface of links, which carry messages between a remote model (its face) and its engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

__all__ = ["Link", "Parcel"]

Parcel: TypeAlias = "Sequence[bytes | bytearray | memoryview]"
"""A message as bytes, in parts: the pickled message, then its large arrays, which are sent without copying."""


class Link(Protocol):
    """Carries parcels to the process of an engine, in order.

    For each parcel from there, the link calls :meth:`~paged_sdk.remote.engine.RemoteEngine.receive`, one call at a
    time; when the connection ends, :meth:`~paged_sdk.remote.engine.RemoteEngine.lost`, once.
    """

    def send(self, parcel: Parcel) -> None:
        """Queue a parcel for sending, without waiting, from any thread and from finalizers. After the connection's end,
        parcels are dropped."""
        ...

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the connection's end, which follows the engine's; False if it is still open after ``timeout``
        seconds."""
        ...

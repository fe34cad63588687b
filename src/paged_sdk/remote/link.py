"""Define what carries messages between a model's face and an engine that runs elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

__all__ = ["Link", "Parcel"]

Parcel: TypeAlias = "Sequence[bytes | bytearray | memoryview]"
"""A message as bytes, in parts: what it says, and the arrays that go with it, which are not copied on the way."""


class Link(Protocol):
    """Carries parcels to where an engine runs, in the order in which they are given.

    What comes back is given to :meth:`~paged_sdk.remote.engine.RemoteEngine.receive`, one parcel after the other, and
    the end of it to :meth:`~paged_sdk.remote.engine.RemoteEngine.lost`, once.
    """

    def send(self, parcel: Parcel) -> None:
        """Have a parcel sent, without waiting: from any thread, and from finalizers. What cannot be sent any more is
        dropped."""
        ...

    def join(self, timeout: float | None = None) -> bool:
        """Wait until nothing comes any more, which is so once the engine is closed; False if that takes longer."""
        ...

"""Send parcels through a connected socket."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import BinaryIO, Final, cast

from paged_sdk.remote.link import Parcel

__all__ = ["Channel"]

_COUNT: Final = struct.Struct("<I")
_BUFFER_BYTES: Final = 1 << 16
_MOST_PARTS: Final = 512
"""The system takes up to 1,024 pieces of memory in one call."""


class Channel:
    """Holds one end of a connection between two processes. One thread may read while others write."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._reader = cast(BinaryIO, end.makefile("rb", buffering=_BUFFER_BYTES))
        self._lock = threading.Lock()

    def write(self, parcel: Parcel) -> None:
        """Send a parcel, and wait until the system has taken it.

        :raises OSError: nobody reads it any more
        """
        parts = [memoryview(part).cast("B") for part in parcel]
        head = _COUNT.pack(len(parts)) + struct.pack(f"<{len(parts)}Q", *map(len, parts))
        pending = [memoryview(head), *(part for part in parts if part.nbytes)]
        with self._lock:
            while pending:
                sent = self._socket.sendmsg(pending[:_MOST_PARTS])
                while pending and sent >= pending[0].nbytes:
                    sent -= pending.pop(0).nbytes
                if sent:
                    pending[0] = pending[0][sent:]

    def read(self) -> Parcel | None:
        """Wait for the next parcel; None: no more come."""
        try:
            count = _COUNT.unpack(self._exactly(_COUNT.size))[0]
            sizes = struct.unpack(f"<{count}Q", self._exactly(8 * count))
            return [self._exactly(size) for size in sizes]
        except (OSError, EOFError, ValueError):  # ValueError: it was closed by another thread
            return None

    def close(self) -> None:
        """Let the other side know that nothing comes any more, and wake who reads here."""
        with suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def release(self) -> None:
        """Let go of what reading needs, once nobody reads any more."""
        self._reader.close()
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        content = bytearray(size)  # which arrays may lie in, and be changed
        view, filled = memoryview(content), 0
        while filled < size:
            read = self._reader.readinto(view[filled:])  # type: ignore[attr-defined]
            if not read:
                raise EOFError
            filled += read
        return content

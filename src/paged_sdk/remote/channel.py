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
"""The most buffers per call; the system's limit is 1,024."""


class Channel:
    """Holds one end of a connection between two processes. One thread may read while others write."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._reader = cast(BinaryIO, end.makefile("rb", buffering=_BUFFER_BYTES))
        self._lock = threading.Lock()

    def write(self, parcel: Parcel) -> None:
        """Send a parcel; block until the system has taken it.

        :raises OSError: the connection is closed
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
        """Wait for the next parcel; None if the connection has ended."""
        try:
            count = _COUNT.unpack(self._exactly(_COUNT.size))[0]
            sizes = struct.unpack(f"<{count}Q", self._exactly(8 * count))
            return [self._exactly(size) for size in sizes]
        except (OSError, EOFError, ValueError):  # ValueError: another thread has closed the channel
            return None

    def close(self) -> None:
        """Shut down the connection, which ends the other side's reading and wakes the reader on this side."""
        with suppress(OSError):  # the other side has closed it already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def release(self) -> None:
        """Free the reader's buffer, once no thread reads."""
        self._reader.close()
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        content = bytearray(size)  # unpickled arrays use this memory, so it must be mutable
        view, filled = memoryview(content), 0
        while filled < size:
            read = self._reader.readinto(view[filled:])  # type: ignore[attr-defined]
            if not read:
                raise EOFError
            filled += read
        return content

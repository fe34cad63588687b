"""Send messages over the pipes of a helper process: each is its length in eight bytes (big-endian), then its bytes."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["read_message", "write_message"]

_LENGTH_BYTES = 8
_MOST_AT_ONCE = 1 << 20


def read_message(read: Callable[[int], bytes | None]) -> bytes | None:
    """Read a message; None if the pipe ends before the message does.

    :param read: reads at most a number of bytes, at least one unless the pipe has ended
    """
    header = _read(read, _LENGTH_BYTES)
    return None if header is None else _read(read, int.from_bytes(header, "big"))


def write_message(write: Callable[[memoryview], int], message: bytes) -> None:
    """Write a message.

    :param write: writes the beginning of some bytes, and returns how many it wrote
    """
    view = memoryview(len(message).to_bytes(_LENGTH_BYTES, "big") + message)
    while view:
        view = view[write(view) :]


def _read(read: Callable[[int], bytes | None], size: int) -> bytes | None:
    pieces = []
    while size:
        piece = read(min(size, _MOST_AT_ONCE))
        if not piece:
            return None
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)

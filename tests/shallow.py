"""Make a real model shallow, where a test is of its arithmetic and not of what it says."""

from __future__ import annotations

import struct
from pathlib import Path

__all__ = ["make_shallow"]

_COUNT = b"llama.block_count"


def make_shallow(file: Path, path: Path, *, num_layers: int) -> Path:
    """Write a copy of a llama's GGUF file whose config counts only its first layers; the other tensors stay unread.

    :returns: ``path``
    """
    content = bytearray(file.read_bytes())
    place = content.index(_COUNT) + len(_COUNT) + 4  # behind the key is the type of its value
    assert struct.unpack_from("<I", content, place)[0] > num_layers
    struct.pack_into("<I", content, place, num_layers)
    path.write_bytes(content)
    return path

"""Make a real model shallow, where a test is of its arithmetic and not of what it says."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from paged_sdk.weights.gguf.file import open_gguf

__all__ = ["make_shallow"]

_COUNT = b"llama.block_count"
_ALIGNMENT = 32


def make_shallow(file: Path, path: Path, *, num_layers: int) -> Path:
    """Write a copy of a llama's GGUF file with its first layers alone. The others' bytes stay, and belong to no tensor.

    :returns: ``path``
    """
    (opened,) = open_gguf(file)
    names = [name.encode() for name in opened.tensors]
    opened.close()
    content = bytearray(file.read_bytes())
    place = content.index(_COUNT) + len(_COUNT) + 4  # behind the key is the type of its value
    assert struct.unpack_from("<I", content, place)[0] > num_layers
    struct.pack_into("<I", content, place, num_layers)
    # The table of tensors: a name after its length, number of dimensions, dimensions, type, offset.
    start = end = content.index(struct.pack("<Q", len(names[0])) + names[0])
    kept = []
    for name in names:
        first, end = end, end + 8 + len(name)
        assert content[first + 8 : end] == name, "tensors are in the order of the table"
        end += 4 + 8 * struct.unpack_from("<I", content, end)[0] + 4 + 8
        layer = re.match(rb"blk\.(\d+)\.", name)
        if layer is None or int(layer[1]) < num_layers:
            kept.append(content[first:end])
    struct.pack_into("<Q", content, 8, len(kept))
    head = content[:start] + b"".join(kept)
    path.write_bytes(head + bytes(-len(head) % _ALIGNMENT) + content[end + -end % _ALIGNMENT :])
    return path

"""Read the typed metadata values at the start of a GGUF file.

See https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np

from paged_sdk.errors import CheckpointError
from paged_sdk.weights.weight_file import WeightFile

__all__ = ["ARRAY", "GgufCursor"]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_BOOL, _STRING, ARRAY = 7, 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_MAX_DEPTH = 4  # levels of arrays within arrays

# The largest metadata in use, Gemma 3's, has 16 MiB and 1.3 million entries (tokens, scores, types, merges).
_MAX_BYTES: Final = 1 << 28
_MAX_ENTRIES: Final = 1 << 23
_ENTRIES_OF_AN_ARRAY: Final = 8  # an array costs the memory and time of this many numbers
_CHUNK_BYTES: Final = 1 << 20


class GgufCursor:
    """Reads the values before the tensors' data sequentially.

    At most 256 MiB and 8 million entries are read, on demand, so that even a malicious file takes only a few seconds
    and a few hundred MB. Every method raises :class:`CheckpointError` if the file ends too early or has an invalid
    value.

    :param file: the file, little endian
    """

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self._buffer = bytearray()
        self._entries_left = _MAX_ENTRIES
        self.offset: int = 0

    def head(self, count: int) -> bytes:
        """Read up to ``count`` bytes, fewer at the end of the file."""
        start = self.offset
        self.offset = min(start + count, self._file.size)
        self._fill(self.offset)
        return bytes(self._buffer[start : self.offset])

    def u32(self) -> int:
        return int(_U32.unpack_from(self._buffer, self._take(4))[0])

    def next_u32(self) -> int:
        """Return the next integer without advancing."""
        value = self.u32()
        self.offset -= 4
        return value

    def u64(self) -> int:
        return int(_U64.unpack_from(self._buffer, self._take(8))[0])

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read a metadata value.

        :param kind: the GGUF id of its type
        :param depth: how many arrays enclose the value
        :returns: an int, float, bool or str, or a list of these (or of lists)
        """
        if kind == ARRAY:
            inner, count = self.u32(), self.u64()
            if depth == _MAX_DEPTH:
                raise self.malformed(f"it nests arrays more than {_MAX_DEPTH} deep")
            return self._values(inner, count, depth + 1)
        return self._values(kind, 1, depth)[0]

    def malformed(self, what: str) -> CheckpointError:
        path = self._file.path
        return CheckpointError(f"{path} cannot be read: {what} (byte {self.offset}); download it again", path=path)

    def _values(self, kind: int, count: int, depth: int) -> list[Any]:
        dtype = _NUMBERS.get(kind)
        if dtype is not None:
            self._require(count * dtype.itemsize)
            self._count(count)
            start = self._take(count * dtype.itemsize)
            data = np.frombuffer(self._buffer, np.uint8, count * dtype.itemsize, start)
            numbers: list[Any] = (data != 0 if kind == _BOOL else data.view(dtype)).tolist()
            return numbers
        if kind == _STRING:
            return self._strings(count)
        if kind == ARRAY:
            self._require(12 * count)
            self._count(_ENTRIES_OF_AN_ARRAY * count)
            return [self.value(ARRAY, depth) for _ in range(count)]
        raise self.malformed(f"it has a metadata value of unknown type {kind}")

    def _strings(self, count: int) -> list[str]:
        # A vocabulary has some hundred thousand strings: a single loop with few calls takes 0.5 us per string.
        self._require(8 * count)
        self._count(count)
        buffer, offset, filled = self._buffer, self.offset, len(self._buffer)
        length_at = _U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                start = offset + 8
                if start > filled:
                    filled = self._fill(start)
                offset = start + length_at(buffer, offset)[0]
                if offset > filled:
                    filled = self._fill(offset)
                strings.append(buffer[start:offset].decode())
        except UnicodeDecodeError as error:
            raise self.malformed(f"it has a string that is not UTF-8 ({error.reason})") from error
        self.offset = offset
        return strings

    def _take(self, num_bytes: int) -> int:
        """Skip the next bytes and return their offset."""
        start = self.offset
        self._fill(start + num_bytes)
        self.offset += num_bytes
        return start

    def _require(self, num_bytes: int) -> None:
        """Raise if the file is too short for that many more bytes, before any are read or allocated."""
        if self.offset + num_bytes > self._file.size:
            raise self._cut_off(self.offset + num_bytes)

    def _count(self, entries: int) -> None:
        self._entries_left -= entries
        if self._entries_left < 0:
            raise self.malformed(f"its metadata has more than {_MAX_ENTRIES} entries")

    def _fill(self, end: int) -> int:
        """Read the file at least up to an offset; return how many bytes have been read in total."""
        filled = len(self._buffer)
        if end > filled:
            if end > self._file.size:
                raise self._cut_off(end)
            if end > _MAX_BYTES:
                raise self.malformed(f"its metadata has more than {_MAX_BYTES} bytes")
            size = min(max(end - filled, _CHUNK_BYTES), self._file.size - filled)
            self._buffer += self._file.read(filled, size)
        return len(self._buffer)

    def _cut_off(self, needed: int) -> CheckpointError:
        return self.malformed(f"it is cut off: at least {needed} bytes are needed, the file has {self._file.size}")

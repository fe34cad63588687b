"""Read the typed values at the start of a GGUF file.

See https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from paged_sdk.errors import CheckpointError
from paged_sdk.weights.mapped_file import MappedFile

__all__ = ["GgufCursor"]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_BOOL, _STRING, _ARRAY = 7, 8, 9
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


class GgufCursor:
    """Marks a place in a GGUF file and advances with everything that is read.

    Every method raises :class:`CheckpointError` where the file ends too early or holds something else.

    :param file: the file, little endian
    :param offset: the offset of the next byte
    """

    def __init__(self, file: MappedFile, offset: int = 0) -> None:
        self._file = file
        self._buffer = file.buffer
        self.offset = offset

    def u32(self) -> int:
        return int(_U32.unpack_from(self._buffer, self._take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self._buffer, self._take(8))[0])

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read a metadata value.

        :param kind: GGUF's number of its type
        :param depth: how many arrays enclose it
        :returns: an int, float, bool or str, or a list of these (or of lists)
        """
        if kind == _ARRAY:
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
            data = np.frombuffer(self._buffer, np.uint8, count * dtype.itemsize, self._take(count * dtype.itemsize))
            numbers: list[Any] = (data != 0 if kind == _BOOL else data.view(dtype)).tolist()
            return numbers
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            self._require(12 * count)
            return [self.value(_ARRAY, depth) for _ in range(count)]
        raise self.malformed(f"it has a metadata value of unknown type {kind}")

    def _strings(self, count: int) -> list[str]:
        # A vocabulary has some hundred thousand of these: one loop with few calls takes 0.5 us for each.
        self._require(8 * count)
        buffer, offset, size = self._buffer, self.offset, self._file.size
        length_at = _U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                start = offset + 8
                offset = start + length_at(buffer, offset)[0]
                if offset > size:
                    raise self._cut_off(offset)
                strings.append(buffer[start:offset].decode())
        except struct.error:
            raise self._cut_off(offset + 8) from None
        except UnicodeDecodeError as error:
            raise self.malformed(f"it has a string that is not UTF-8 ({error.reason})") from error
        self.offset = offset
        return strings

    def _take(self, num_bytes: int) -> int:
        """Return the offset of the next bytes, and skip them."""
        self._require(num_bytes)
        start = self.offset
        self.offset += num_bytes
        return start

    def _require(self, num_bytes: int) -> None:
        if self.offset + num_bytes > self._file.size:
            raise self._cut_off(self.offset + num_bytes)

    def _cut_off(self, needed: int) -> CheckpointError:
        return self.malformed(f"it is cut off: at least {needed} bytes are needed, the file has {self._file.size}")

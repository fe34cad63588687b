"""Cache the result of in-situ quantization in a file, so that the next start reads it instead of quantizing again.

The file holds the quantized rows of all matrices, in parts, in the order in which they were made; then a JSON index
with the offset and checksum of each part; then the offset, length and checksum of the index. It is renamed to its path
once complete; until then it has no name (Linux) or a temporary one. A part with a wrong checksum or size is quantized
again.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from uuid import uuid4
from zlib import crc32

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.errors import CheckpointError
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix, UnreadGroupedMatrix
from paged_sdk.kernels.quantized.packed_codes import CodeForm, PackedCodes
from paged_sdk.kernels.quantized.stored_matrix import UnreadRows
from paged_sdk.logs import get_logger
from paged_sdk.weights.weight_file import WeightFile

__all__ = ["Quantized", "QuantizedCache"]

_log = get_logger(__name__)

_MAGIC: Final = b"paged-sdk weights 1\n"
_END: Final = struct.Struct("<QQL")  # the index's offset, its length and its checksum
_LONGEST_INDEX: Final = 1 << 28
_DESCRIPTORS: Final = "/proc/self/fd"

Quantized = BlockMatrix | UnreadGroupedMatrix


@frozen
class _Part:
    """Locates consecutive rows of a matrix in the file.

    :ivar rows: the first row, and the row after the last
    :ivar offset: the offset of their first byte
    """

    rows: tuple[int, int]
    offset: int
    num_bytes: int
    checksum: int


class QuantizedCache:
    """Caches quantized matrices between quantization and packing. Thread-safe.

    :param path: the file; its directory is created if necessary
    :param identity: a hash of the source files, settings and code that determine the matrices: a file with another
        identity is replaced
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._path = path
        self._identity = identity
        self._lock = threading.Lock()
        self._parts: dict[str, list[_Part]] = {}
        self._file = self._open()
        self._new = _NewFile(path) if self._file is None else None
        self._is_damaged = False

    def cached(self, name: str, made: Quantized) -> Quantized:
        """Return a matrix that reads its rows from the file, or writes them there as they are quantized.

        :param name: a unique key, which includes the quantized type
        :param made: the matrix, whose rows are quantized when they are read
        """
        if isinstance(made, UnreadGroupedMatrix):
            groups = _Groups(made)

            def grouped(first: int, last: int) -> GroupedMatrix:
                rows = self._rows(name, (first, last), groups.row_bytes, lambda: groups.bytes_of(first, last))
                return groups.matrix(rows)

            return evolve(made, read=grouped)
        shape = made.stored.shape

        def blocks(first: int, last: int) -> Tensor:
            return self._rows(name, (first, last), shape[1], lambda: made.rows(slice(first, last)).blocks)

        return BlockMatrix(made.tensor_type, UnreadRows(shape=(shape[0], shape[1]), itemsize=1, read=blocks))

    def close(self, *, is_complete: bool) -> None:
        """Move a new file to its path if loading is complete, or delete it. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
            if self._is_damaged:
                with suppress(OSError):
                    self._path.unlink()
        if self._new is not None:
            new, self._new = self._new, None
            new.close(self._index() if is_complete else None)

    def _rows(self, name: str, rows: tuple[int, int], row_bytes: int, make: Callable[[], Tensor]) -> Tensor:
        """Read rows from the file, or make them; return their bytes, ``[rows, row_bytes]``."""
        found = self._read(name, rows, row_bytes) if self._file is not None else None
        if found is not None:
            return found
        made = make()
        if self._new is not None and (part := self._new.written(rows, made)) is not None:
            with self._lock:
                self._parts.setdefault(name, []).append(part)
        return made

    def _read(self, name: str, rows: tuple[int, int], row_bytes: int) -> Tensor | None:
        """Read rows from the parts that hold them; None if a part is missing or damaged."""
        first, last = rows
        found: list[Tensor] = []
        for part in self._parts.get(name, ()):
            begin, end = part.rows
            if begin <= first < end and first < last:
                data = self._checked(part)
                if data is None or len(data) != (end - begin) * row_bytes:
                    break
                found.append(data.view(-1, row_bytes)[first - begin : last - begin])
                first = min(end, last)
        if first < last:
            self._found_damaged(name)
            return None
        return found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0, row_bytes).byte()

    def _checked(self, part: _Part) -> Tensor | None:
        file = self._file
        assert file is not None
        try:
            data = file.tensor(part.offset, part.num_bytes)
        except CheckpointError:
            return None
        return data if crc32(data.numpy().data) == part.checksum else None

    def _found_damaged(self, name: str) -> None:
        with self._lock:
            is_first, self._is_damaged = not self._is_damaged, True
        if is_first:
            _log.warning("%s does not hold %s as it was written: what is damaged is made anew.", self._path, name)

    def _open(self) -> WeightFile | None:
        """Open the file and read its index; None if there is no usable file."""
        if not os.path.exists(self._path):  # Path.exists may raise PermissionError
            return None
        try:
            file = WeightFile(self._path)
            if file.size < len(_MAGIC) + _END.size:
                raise ValueError("it is cut off")
            offset, length, checksum = _END.unpack(file.read(file.size - _END.size, _END.size))
            if not len(_MAGIC) <= offset <= offset + length == file.size - _END.size or length > _LONGEST_INDEX:
                raise ValueError("it does not end in an index")
            index = file.read(offset, length)
            if file.read(0, len(_MAGIC)) != _MAGIC or crc32(index) != checksum:
                raise ValueError("the index is damaged")
            content = json.loads(index)
            if content["identity"] != self._identity:
                _log.info("%s is of other weights or another version: it is made anew.", self._path)
                file.close()
                return None
            self._parts = {name: _parts(entries, offset) for name, entries in content["parts"].items()}
        except (CheckpointError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            _log.warning("%s cannot be used: %s. It is made anew.", self._path, error)
            return None
        return file

    def _index(self) -> bytes:
        parts = {
            name: [
                (*part.rows, part.offset, part.num_bytes, part.checksum)
                for part in sorted(parts, key=lambda part: part.rows)
            ]
            for name, parts in self._parts.items()
        }
        return json.dumps({"identity": self._identity, "parts": parts}).encode()


class _NewFile:
    """Writes parts to a new file, which replaces the file at ``path`` once complete. If writing fails, the new file is
    deleted and loading continues without it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._end = len(_MAGIC)
        self._descriptor: int | None = None
        self._beside: Path | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor, self._beside = _open_beside(path)
            _write_at(self._descriptor, memoryview(_MAGIC), 0)
        except OSError as error:
            self._failed(error)

    def written(self, rows: tuple[int, int], data: Tensor) -> _Part | None:
        """Write the bytes of some rows; None if writing has failed."""
        view = data.contiguous().view(-1).numpy().data
        with self._lock:
            if self._descriptor is None:
                return None
            offset, self._end = self._end, self._end + len(view)
            try:
                _write_at(self._descriptor, view, offset)
            except OSError as error:
                self._failed(error)
                return None
        return _Part(rows, offset, len(view), crc32(view))

    def close(self, index: bytes | None) -> None:
        """Write the index and move the file to its path; without an index, delete the file."""
        if self._descriptor is None or index is None:
            self._drop()
            return
        try:
            _write_at(self._descriptor, memoryview(index + _END.pack(self._end, len(index), crc32(index))), self._end)
            if self._beside is None:
                self._beside = _give_name(self._descriptor, self._path)
            os.close(self._descriptor)
            self._descriptor = None
            # Without fsync: if a power failure loses data, the checksums detect it.
            os.replace(self._beside, self._path)
        except OSError as error:
            self._failed(error)
            return
        self._beside = None
        _log.info("Quantized weights are cached in %s.", self._path)

    def _failed(self, error: OSError) -> None:
        _log.warning("Quantized weights are not cached in %s: %s.", self._path, error.strerror or error)
        self._drop()

    def _drop(self) -> None:
        with suppress(OSError):
            if self._descriptor is not None:
                os.close(self._descriptor)
        self._descriptor = None
        with suppress(OSError):
            if self._beside is not None:
                self._beside.unlink()
        self._beside = None


def _open_beside(path: Path) -> tuple[int, Path | None]:
    """Open a new file in the directory of a path; return its descriptor, and its name or None. The system removes a
    file without a name however this process ends, such as by Ctrl-C while a model is loading.
    """
    if sys.platform == "linux" and os.path.isdir(_DESCRIPTORS):
        with suppress(OSError):  # not every file system supports O_TMPFILE
            return os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o600), None
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    return descriptor, Path(name)


def _give_name(descriptor: int, path: Path) -> Path:
    """Link an unnamed file under a new temporary name in the directory of a path; return the name."""
    name = path.with_name(f".{path.name}.{uuid4().hex}")
    # With src_dir_fd, Python calls linkat() with AT_SYMLINK_FOLLOW, as /proc/self/fd/N is a symlink; plain link() would
    # not follow it. The descriptor itself is ignored, since the path is absolute.
    os.link(f"{_DESCRIPTORS}/{descriptor}", name, src_dir_fd=descriptor)
    return name


class _Groups:
    """Converts rows of a grouped matrix to bytes and back: codes (2- and 4-bit codes packed as a bit stream, others one
    per byte), then float32 scales and minima.
    """

    def __init__(self, made: UnreadGroupedMatrix) -> None:
        cols = made.shape[1]
        self._made = made
        self._per_byte = 8 // made.bits if made.bits in (2, 4) and cols * made.bits % 8 == 0 else 1
        self._code_bytes = cols // self._per_byte
        self._scale_bytes = 4 * -(-cols // made.group_size)
        self.row_bytes = self._code_bytes + self._scale_bytes * (1 + made.has_minima)

    def bytes_of(self, first: int, last: int) -> Tensor:
        """Quantize rows and return their bytes, ``[rows, row_bytes]``."""
        made = self._made.read(first, last)
        bits, codes = made.bits, made.codes.view(last - first, self._code_bytes, self._per_byte)
        packed = codes[:, :, 0].clone()
        for place in range(1, self._per_byte):
            packed |= codes[:, :, place] << place * bits
        of_groups = [made.scales] if made.minima is None else [made.scales, made.minima]
        return torch.cat([packed, *(each.contiguous().view(torch.uint8) for each in of_groups)], dim=1)

    def matrix(self, data: Tensor) -> GroupedMatrix:
        """Return the rows that some bytes hold."""
        made, rows = self._made, len(data)
        sizes = [self._code_bytes] + [self._scale_bytes] * (1 + made.has_minima)
        codes, scales, *minima = torch.split(data, sizes, dim=1)
        bits = 8 // self._per_byte
        shape = (rows, made.shape[1])
        return GroupedMatrix(
            codes=PackedCodes(words=codes, form=CodeForm.STREAM, shape=shape, bits=bits),
            scales=scales.contiguous().view(torch.float32),
            minima=minima[0].contiguous().view(torch.float32) if minima else None,
            group_size=made.group_size,
            levels=made.levels,
            order=made.order,
            bits=made.bits,
        )


def _parts(entries: list[list[Any]], end: int) -> list[_Part]:
    """Read the parts of one matrix from the index.

    :param end: the offset at which the last part ends
    :raises ValueError: a part lies outside of the file's parts; a malformed index may raise other exceptions
    """
    found = [_Part((int(first), int(last)), int(at), int(size), int(sum_)) for first, last, at, size, sum_ in entries]
    if any(not 0 <= part.offset <= part.offset + part.num_bytes <= end for part in found):
        raise ValueError("a part is elsewhere")
    return found


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    os.lseek(descriptor, offset, os.SEEK_SET)
    while data:
        data = data[os.write(descriptor, data) :]

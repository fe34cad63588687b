"""Read one safetensors file: a JSON header, then the tensors' data.

See https://huggingface.co/docs/safetensors. The safetensors package maps files into memory, and accessing a mapped file
that was truncated kills the process with SIGBUS; this module reads instead. It makes the same checks as the package:
lengths, JSON, shapes against offsets, gaps, overlaps, and that the file ends with its last tensor.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError, shown
from paged_sdk.kernels.quantized.stored_matrix import UnreadRows
from paged_sdk.weights.weight_file import WeightFile

__all__ = ["SafetensorsFile"]

# Without the types that have two 4-bit elements per byte: torch cannot view bytes as these.
_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "U32": torch.uint32,
        "F8_E8M0": torch.float8_e8m0fnu,
        "BOOL": torch.bool,
    }
)
_MAX_HEADER: Final = 100_000_000  # the format's own limit
_MAX_DIMS: Final = 64
_LENGTH: Final = struct.Struct("<Q")


@frozen
class _Entry:
    """Holds a tensor's entry of the header.

    :ivar first: the offset of the tensor's first byte in the file
    :ivar num_bytes: its size
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    num_bytes: int


class SafetensorsFile:
    """Reads one safetensors file: the header on construction, tensors on demand.

    :param path: the file
    :raises CheckpointError: the file is missing, truncated or malformed
    :raises UnsupportedQuantizationError: a tensor has an unsupported dtype
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = WeightFile(path)
        data_start, header = self._read_header()
        self._entries = {name: self._entry(name, entry, data_start) for name, entry in header.items()}
        end, last = data_start, ""
        for name, entry in sorted(self._entries.items(), key=lambda item: (item[1].first, item[1].num_bytes)):
            if entry.first != end:
                kind = "overlaps" if entry.first < end else "leaves a gap after"
                raise self._malformed(f"tensor {shown(name)} {kind} {shown(last)}")
            end, last = entry.first + entry.num_bytes, name
        if end != self._file.size:
            raise self._malformed(f"its tensors end at byte {end}, the file has {self._file.size}")

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor.

        :param name: one of :meth:`names`
        """
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a stored tensor.

        :param name: one of :meth:`names`
        """
        return self._entries[name].dtype

    def tensor(self, name: str) -> Tensor:
        """Read a stored tensor into memory of its own.

        :param name: one of :meth:`names`
        :raises CheckpointError: the file is closed, or has changed since it was opened
        """
        entry = self._entries[name]
        return self._file.tensor(entry.first, entry.num_bytes).view(entry.dtype).view(entry.shape)

    def unread_rows(self, name: str) -> UnreadRows:
        """Return a stored tensor as a matrix whose rows are read on demand.

        :param name: one of :meth:`names`, with at least two dimensions
        """
        entry = self._entries[name]
        rows, cols = math.prod(entry.shape[:-1]), entry.shape[-1]
        row_bytes = cols * entry.dtype.itemsize

        def read(first: int, last: int) -> Tensor:
            values = self._file.tensor(entry.first + first * row_bytes, (last - first) * row_bytes)
            return values.view(entry.dtype).view(last - first, cols)

        return UnreadRows(shape=(rows, cols), itemsize=entry.dtype.itemsize, read=read)

    def unread_bytes(self, name: str, rows: int) -> UnreadRows:
        """Return the bytes of a stored tensor as a uint8 matrix whose rows are read on demand.

        :param name: one of :meth:`names`
        :param rows: the number of rows, a divisor of the tensor's size in bytes
        """
        entry = self._entries[name]
        row_bytes = entry.num_bytes // max(1, rows)

        def read(first: int, last: int) -> Tensor:
            values = self._file.tensor(entry.first + first * row_bytes, (last - first) * row_bytes)
            return values.view(last - first, row_bytes)

        return UnreadRows(shape=(rows, row_bytes), itemsize=1, read=read)

    def num_bytes(self, name: str) -> int:
        """Return the size of a stored tensor in bytes.

        :param name: one of :meth:`names`
        """
        return self._entries[name].num_bytes

    def close(self) -> None:
        """Close the file; tensors that were read stay valid."""
        self._file.close()

    def _read_header(self) -> tuple[int, dict[str, Any]]:
        """Return the offset at which the tensors' data begins, and the tensors' entries."""
        if self._file.size < _LENGTH.size:
            raise self._malformed("it is cut off within its header")
        (length,) = _LENGTH.unpack(self._file.read(0, _LENGTH.size))
        data_start = _LENGTH.size + length
        if length > _MAX_HEADER or data_start > self._file.size:
            raise self._malformed(f"its header would have {length} bytes, the file has {self._file.size}")
        try:
            header = json.loads(self._file.read(_LENGTH.size, length).decode(), object_pairs_hook=_without_repetition)
        except (ValueError, RecursionError) as error:
            raise self._malformed(f"invalid JSON in header: {error}") from error
        if not isinstance(header, dict):
            raise self._malformed(f"invalid JSON in header: {type(header).__name__} instead of an object")
        header.pop("__metadata__", None)
        return data_start, header

    def _entry(self, name: str, entry: object, data_start: int) -> _Entry:
        match entry:
            case {"dtype": str(kind), "shape": [*shape], "data_offsets": [int(first), int(end)]}:
                pass
            case _:
                raise self._malformed(f"its header does not describe tensor {shown(name)}")
        dtype = _DTYPES.get(kind)
        if dtype is None:
            raise UnsupportedQuantizationError(
                f"{self.path}: tensor {shown(name)} has element type {shown(kind)}: "
                f"supported are {', '.join(sorted(_DTYPES))}",
                path=self.path,
                quantization=kind,
                supported=sorted(_DTYPES),
            )
        # The sizes of an empty tensor's other dimensions are arbitrary, so they are bounded by the file's size.
        lengths = [length for length in shape if type(length) is int and 0 <= length <= self._file.size]
        if len(lengths) < len(shape) or len(shape) > _MAX_DIMS:
            raise self._malformed(f"its header gives tensor {shown(name)} the shape {str(shape)[:100]}")
        num_bytes = math.prod(lengths) * dtype.itemsize
        if type(first) is not int or type(end) is not int or first < 0 or end - first != num_bytes:
            raise self._malformed(f"tensor {shown(name)} of {num_bytes} bytes has the offsets {first} and {end}")
        return _Entry(dtype, tuple(lengths), data_start + first, num_bytes)

    def _malformed(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} cannot be read: {what}; download it again", path=self.path)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has the same name twice")
    return found

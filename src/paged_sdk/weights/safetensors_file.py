"""The safetensors format: eight bytes of header length, a JSON header, the tensors' bytes.

See https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError
from paged_sdk.weights.mapped_file import MappedFile

__all__ = ["SafetensorsFile"]

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_DTYPES = {
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
    "BOOL": torch.bool,
}


@frozen
class _Entry:
    """One tensor's place: ``num_bytes`` at ``offset`` of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsFile:
    """One memory-mapped safetensors file.

    :param path: the file
    :raises CheckpointError: the file is missing, cut off or malformed
    :raises UnsupportedQuantizationError: a tensor has an element type that torch does not know
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        data_start, header = self._header()
        self._entries = {
            name: self._entry(name, fields, data_start) for name, fields in header.items() if name != "__metadata__"
        }
        self._check_overlaps()

    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a stored tensor.

        :param name: one of :meth:`names`
        """
        return self._entries[name].shape

    def tensor(self, name: str) -> Tensor:
        """A stored tensor, which shares the file's map.

        :param name: one of :meth:`names`
        """
        entry = self._entries[name]
        if not entry.num_bytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        data = self._file.tensor(entry.offset, entry.num_bytes)
        if entry.offset % entry.dtype.itemsize:  # the format does not ask writers to align
            data = data.clone()
        return data.view(entry.dtype).view(entry.shape)

    def close(self) -> None:
        """Let go of the map; tensors handed out stay valid."""
        self._file.close()

    def _header(self) -> tuple[int, dict[str, Any]]:
        """Where the data starts, and the header."""
        buffer, size = self._file.buffer, self._file.size
        length = int.from_bytes(buffer[:8], "little")
        if size < 8 or not 2 <= length <= _MAX_HEADER_BYTES:
            raise self._malformed(f"its header claims {length} bytes, so it is no safetensors file")
        if 8 + length > size:
            raise self._malformed(f"it is cut off: the header takes {8 + length} bytes, the file has {size}")
        try:
            header = json.loads(buffer[8 : 8 + length])
        except (ValueError, RecursionError) as error:
            raise self._malformed(f"its header is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._malformed("its header is not a JSON object")
        return 8 + length, header

    def _entry(self, name: str, fields: object, data_start: int) -> _Entry:
        match fields:
            # A tensor without elements could claim any other dimension: the file's size is bound enough.
            case {"dtype": str(dtype_name), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if all(
                isinstance(size, int) and 0 <= size <= self._file.size for size in shape
            ):
                pass
            case _:
                raise self._malformed(f"its header describes tensor {name!r} as {reprlib.repr(fields)}")
        dtype = _DTYPES.get(dtype_name)
        if dtype is None:
            raise UnsupportedQuantizationError(
                f"{self.path}: tensor {name!r} has element type {dtype_name!r}: supported are {', '.join(_DTYPES)}",
                path=self.path,
                quantization=dtype_name,
                supported=_DTYPES,
            )
        if not 0 <= begin <= end or end - begin != math.prod(shape) * dtype.itemsize:
            raise self._malformed(f"tensor {name!r}, {dtype_name} {shape}, is said to lie at bytes {begin} to {end}")
        if data_start + end > self._file.size:
            raise self._malformed(
                f"it is cut off: tensor {name!r} ends at byte {data_start + end}, the file has {self._file.size}"
            )
        return _Entry(dtype, tuple(shape), data_start + begin, end - begin)

    def _check_overlaps(self) -> None:
        previous_end = 0
        for name, entry in sorted(self._entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
            if entry.offset < previous_end:
                raise self._malformed(f"tensor {name!r} overlaps the one before it")
            previous_end = entry.offset + entry.num_bytes

    def _malformed(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} cannot be read: {what}; download it again", path=self.path)

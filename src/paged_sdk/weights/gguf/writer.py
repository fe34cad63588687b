"""Write GGUF files with the gguf package, with only a part of one tensor in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
from attrs import frozen

from paged_sdk.errors import ConfigError, shown
from paged_sdk.kernels.quantized.gguf_blocks import block_format

__all__ = ["GgufValue", "PlannedTensor", "write_gguf_file"]

_PACKAGE: Final = "the package gguf: pip install 'paged-sdk[gguf]'"


@frozen
class GgufValue:
    """Holds a metadata value and its GGUF type.

    :ivar kind: the GGUF id of the value's type
    :ivar inner: the id of the type of an array's entries; None if the value is not an array
    """

    value: Any
    kind: int
    inner: int | None = None

    @classmethod
    def of(cls, value: Any) -> GgufValue:
        """Return a value with the type that llama.cpp expects: ints are uint32, in arrays int32; bytes are an array of
        uint8.

        :raises TypeError: GGUF has no type for the value
        """
        match value:
            case bool():
                return cls(value, 7)
            case int():
                return cls(value, 4)
            case float():
                return cls(value, 6)
            case str():
                return cls(value, 8)
            case bytes():
                return cls(list(value), 9, 0)
            case [first, *_]:
                return cls(value, 9, 5 if type(first) is int else cls.of(first).kind)
        raise TypeError(f"{shown(value)} has no type in GGUF")


@frozen(kw_only=True, eq=False)
class PlannedTensor:
    """Describes a tensor to write.

    :ivar name: the GGUF name
    :ivar shape: the shape in torch's order
    :ivar type: the ggml type id
    :ivar parts: yields the tensor's bytes, in order
    """

    name: str
    shape: tuple[int, ...]
    type: int
    parts: Callable[[], Iterator[npt.NDArray[np.uint8]]]

    @property
    def num_bytes(self) -> int:
        """Return the tensor's size in bytes."""
        form = block_format(self.type)
        return math.prod(self.shape) // form.elements * form.num_bytes


@frozen(eq=False)
class _Parts:
    """Mimics the array interface that the gguf package writes from, and makes the bytes during the write."""

    tensor: PlannedTensor

    @property
    def nbytes(self) -> int:
        return self.tensor.num_bytes

    def tofile(self, file: IO[bytes]) -> None:
        written = 0
        for part in self.tensor.parts():
            file.write(part.data)
            written += part.nbytes
        assert written == self.nbytes, f"{self.tensor.name}: {written} of {self.nbytes} bytes"


def write_gguf_file(
    path: Path,
    metadata: Mapping[str, GgufValue],
    tensors: Sequence[PlannedTensor],
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a file. For an atomic write, take the path from :func:`~paged_sdk.weights.new_target.new_file`.

    :param metadata: values by GGUF key; ``general.architecture`` is required
    :param on_progress: called with the number of tensors written so far and in total
    :raises ConfigError: the gguf package is not installed
    :raises OSError: the file cannot be written
    """
    try:
        import gguf
    except ImportError:
        raise ConfigError.of("target", path.name, _PACKAGE) from None
    writer = gguf.GGUFWriter(path, metadata["general.architecture"].value)
    try:
        for key, value in metadata.items():
            if key != "general.architecture":
                inner = None if value.inner is None else gguf.GGUFValueType(value.inner)
                writer.add_key_value(key, value.value, gguf.GGUFValueType(value.kind), sub_type=inner)
        for tensor in tensors:
            kind = gguf.GGMLQuantizationType(tensor.type)
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for number, tensor in enumerate(tensors, 1):
            parts: Any = _Parts(tensor)
            writer.write_tensor_data(parts)
            if on_progress is not None:
                on_progress(number, len(tensors))
        writer.flush()
    finally:
        writer.close()

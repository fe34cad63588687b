"""A file in memory, read only where it is touched."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from paged_sdk.errors import CheckpointError

__all__ = ["MappedFile"]


class MappedFile:
    """A memory-mapped file, whose tensors share the map.

    :ivar path: the file
    :ivar size: its length in bytes
    :raises CheckpointError: the file cannot be opened, or is empty
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # A private map counts as writable, as torch wants of memory that it shares; nothing reaches the file.
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror or error}", path=path) from error
        except ValueError as error:
            raise CheckpointError(f"{path} is empty: download it again", path=path) from error
        self.size = len(self._map)

    @property
    def buffer(self) -> mmap.mmap:
        """The file's bytes.

        :raises CheckpointError: the file is closed
        """
        if self._map is None:
            raise CheckpointError(f"{self.path} is closed", path=self.path)
        return self._map

    def tensor(self, offset: int, num_bytes: int) -> Tensor:
        """Bytes of the file as uint8 [num_bytes], which share and keep alive the map.

        :param offset: of the first byte; the range must lie within the file and not be empty
        """
        assert 0 <= offset < offset + num_bytes <= self.size
        return torch.frombuffer(self.buffer, dtype=torch.uint8, count=num_bytes, offset=offset)

    def close(self) -> None:
        """Let go of the map. It is unmapped with the last tensor that shares it, for these hold it without the buffer
        protocol's lock: unmapping here would leave them pointing at nothing.

        Until then its pages leave the process's memory, for most tensors were copied into another layout. What is read
        again comes back from the file; so tensors that share the map must not have been written to.
        """
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        self._map = None

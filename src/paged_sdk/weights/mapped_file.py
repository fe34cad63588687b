"""Map a file into memory, so that it is read only where it is touched."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from paged_sdk.errors import CheckpointError

__all__ = ["MappedFile"]


class MappedFile:
    """Maps a file into memory; its tensors share the map.

    :ivar path: the file
    :ivar size: its length in bytes
    :raises CheckpointError: the file cannot be opened, or is empty
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # A private map counts as writable, as torch demands of shared memory; nothing is written to the file.
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror or error}", path=path) from error
        except ValueError as error:
            raise CheckpointError(f"{path} is empty: download it again", path=path) from error
        self.size = len(self._map)

    @property
    def buffer(self) -> mmap.mmap:
        """Return the file's bytes.

        :raises CheckpointError: the file is closed
        """
        if self._map is None:
            raise CheckpointError(f"{self.path} is closed", path=self.path)
        return self._map

    def tensor(self, offset: int, num_bytes: int) -> Tensor:
        """Return bytes of the file as uint8 [num_bytes], which share the map and keep it alive.

        :param offset: the offset of the first byte; the range must lie within the file and not be empty
        """
        assert 0 <= offset < offset + num_bytes <= self.size
        return torch.frombuffer(self.buffer, dtype=torch.uint8, count=num_bytes, offset=offset)

    def close(self) -> None:
        """Release the map. It is unmapped with the last tensor that shares it, because tensors hold it without the
        buffer protocol's lock: unmapping here would leave them with invalid pointers.

        Until then its pages leave the process's memory, because most tensors were copied into another layout. Pages
        that are read again come back from the file; so tensors that share the map must not have been written to.
        """
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        self._map = None

"""Read ranges of a weight file into memory of their own.

Files are not mapped: if a mapped file is truncated, the process dies with SIGBUS; if it is overwritten, the weights of
a running model change.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from paged_sdk.errors import CheckpointError
from paged_sdk.kernels.own_pages import own_pages
from paged_sdk.system.files import CheckpointFile, open_file

__all__ = ["WeightFile"]


class WeightFile:
    """Reads a file, which must not change while it is open. Several threads may read at once.

    :ivar path: the file
    :ivar size: its length in bytes
    :raises CheckpointError: the file cannot be opened, is empty, or is a pipe or a device
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: CheckpointFile | None = open_file(path)
        self._opened = self._file.stat()
        self.size: int = self._opened.st_size
        if not self.size:
            raise CheckpointError(f"{path} is empty: download it again", path=path)

    def tensor(self, offset: int, num_bytes: int) -> Tensor:
        """Return bytes of the file as a new tensor, uint8 [num_bytes].

        :param offset: the offset of the first byte; the range must lie within the file
        :raises CheckpointError: the file is closed, or has changed since it was opened
        """
        data = own_pages(num_bytes)
        self._fill(offset, data.numpy().data)
        return data

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes of the file.

        :param offset: as for :meth:`tensor`, which raises the same errors
        """
        data = bytearray(num_bytes)
        self._fill(offset, memoryview(data))
        return bytes(data)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def __del__(self) -> None:
        # Close here, so that a source that is dropped unclosed, as after an error, causes no ResourceWarning.
        if getattr(self, "_file", None) is not None:
            self.close()

    def _fill(self, offset: int, target: memoryview) -> None:
        assert 0 <= offset <= offset + len(target) <= self.size
        if self._file is None:
            raise CheckpointError(f"{self.path} is closed", path=self.path)
        count = self._file.read_into(offset, target)
        now = self._file.stat()  # after reading, to detect changes during it
        if count < len(target) or (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise CheckpointError(f"{self.path} was changed while it was being loaded", path=self.path)

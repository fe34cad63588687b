"""Define the one interface through which models read every kind of checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from paged_sdk.kernels.stored_matrix import StoredMatrix

__all__ = ["WeightSource"]


class WeightSource(Protocol):
    """Gives tensors by name.

    Names, shapes and meaning are always those of a Hugging Face checkpoint, whatever the file holds.
    """

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        ...

    def __contains__(self, name: object) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, in elements.

        :raises CheckpointError: there is no tensor of that name
        """
        ...

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return one tensor, decoded where it is stored quantized.

        The result may share the file's private (copy-on-write) map: no memory is spent on a tensor that is stored in
        ``dtype`` and wanted on the CPU. It stays valid after :meth:`close`.

        :param dtype: the dtype of the result
        :param device: the device of the result
        :raises CheckpointError: there is no tensor of that name, or the source is closed
        """
        ...

    def matrix(self, name: str) -> StoredMatrix:
        """Return one matrix as it is stored; a tensor with more than two dimensions becomes its matrices one below the
        other.

        It may share the file's private map, and stays valid after :meth:`close`.

        :param name: the name of a tensor with at least two dimensions
        :raises CheckpointError: there is no tensor of that name, or the source is closed
        """
        ...

    def close(self) -> None:
        """Release the files; a map is released with the last tensor that shares it. Idempotent."""
        ...

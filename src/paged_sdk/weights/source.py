"""Define the interface through which models read checkpoints of any format."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paged_sdk.errors import CheckpointError
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix

__all__ = ["OfFiles", "WeightSource", "malformed"]


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
        """Return one tensor, dequantized if necessary.

        The result owns its memory: it stays valid after :meth:`close`, and does not change with the file.

        :param dtype: the dtype of the result
        :param device: the device of the result
        :raises CheckpointError: there is no tensor of that name, the source is closed, or its file has changed
        """
        ...

    def matrix(self, name: str) -> StoredMatrix:
        """Return one matrix as it is stored; a tensor with more than two dimensions is flattened to ``[rows, cols]``,
        its matrices stacked vertically.

        Rows may be read on demand, any number at a time, and again on each access. Reading raises the errors of
        :meth:`tensor`, so the source must stay open.

        :param name: the name of a tensor with at least two dimensions
        :raises CheckpointError: there is no tensor of that name, the source is closed, or its file has changed
        """
        ...

    def close(self) -> None:
        """Close the files. Idempotent."""
        ...


@runtime_checkable
class OfFiles(Protocol):
    """Names the files that tensors come from, for error messages; optional for a :class:`WeightSource`."""

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor; for a missing tensor, the path that was searched."""
        ...


def malformed(source: WeightSource, name: str, what: str) -> CheckpointError:
    """Return an error that names the file of a tensor, if the source has files.

    :param name: the tensor
    :param what: what is wrong; begins the message after the file
    """
    path = source.path_of(name) if isinstance(source, OfFiles) else None
    return CheckpointError(what if path is None else f"{path}: {what}", path=path)

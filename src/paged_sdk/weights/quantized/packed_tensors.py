"""Give a format access to the tensors of one packed matrix, with checks of their dtypes and shapes."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import CheckpointError, shown
from paged_sdk.kernels.quantized.stored_matrix import UnreadRows
from paged_sdk.weights.safetensors.source import SafetensorsSource

__all__ = ["FLOATS", "LaterTensor", "PackedTensors"]

FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)
"""The usual dtypes of scales."""


@frozen
class PackedTensors:
    """Gives access to the tensors of one packed matrix by the suffixes of their names.

    :ivar source: the checkpoint's tensors as they are stored
    :ivar prefix: the common prefix of the tensors' names, such as ``model.layers.0.mlp.up_proj``
    """

    source: SafetensorsSource
    prefix: str

    def __contains__(self, suffix: str) -> bool:
        """Return whether the checkpoint has such a tensor."""
        return self.prefix + suffix in self.source

    def dtype(self, suffix: str) -> torch.dtype:
        """Return the dtype of a tensor.

        :raises CheckpointError: the tensor is missing
        """
        self._require(suffix)
        return self.source.dtype(self.prefix + suffix)

    def shape(self, suffix: str, dims: int) -> tuple[int, ...]:
        """Return the shape of a tensor.

        :param dims: the expected number of dimensions
        :raises CheckpointError: the tensor is missing, or has another number of dimensions
        """
        self._require(suffix)
        found = self.source.shape(self.prefix + suffix)
        if len(found) != dims:
            raise self.error(suffix, f"has shape {list(found)}: expected {dims} dimensions")
        return found

    def check(self, suffix: str, dtypes: Collection[torch.dtype], *shapes: tuple[int, ...]) -> None:
        """Check the dtype and shape of a tensor, without reading its data.

        :param shapes: the allowed shapes; none given: any shape
        :raises CheckpointError: the tensor is missing, or has another dtype or shape
        """
        found, shape = self.dtype(suffix), self.source.shape(self.prefix + suffix)
        if found not in dtypes:
            expected = ", ".join(sorted(str(each) for each in dtypes))
            raise self.error(suffix, f"has elements of {found}: expected {expected}")
        if shapes and shape not in shapes:
            expected = " or ".join(str(list(each)) for each in dict.fromkeys(shapes))
            raise self.error(suffix, f"has shape {list(shape)}: expected {expected}")

    def tensor(self, suffix: str, dtypes: Collection[torch.dtype], *shapes: tuple[int, ...]) -> Tensor:
        """Read a tensor after the checks of :meth:`check`."""
        self.check(suffix, dtypes, *shapes)
        return self.source.stored(self.prefix + suffix)

    def floats(self, suffix: str, *shapes: tuple[int, ...]) -> Tensor:
        """Read scales and the like as float32."""
        return self.tensor(suffix, FLOATS, *shapes).float()

    def rows(self, suffix: str) -> UnreadRows:
        """Return a tensor whose rows are read on demand."""
        return self.source.unread_rows(self.prefix + suffix)

    def unread_bytes(self, suffix: str, rows: int, row_bytes: int) -> UnreadRows:
        """Return the bytes of a tensor as rows that are read on demand.

        :raises CheckpointError: the tensor is missing, or has another size than ``rows * row_bytes``
        """
        self._require(suffix)
        name = self.prefix + suffix
        found = self.source.num_bytes(name)
        if found != rows * row_bytes:
            raise self.error(suffix, f"has {found} bytes: expected {rows * row_bytes}")
        return self.source.unread_bytes(name, rows)

    def number(self, suffix: str) -> int:
        """Read a tensor that holds one integer.

        :raises CheckpointError: the tensor is missing, or does not hold exactly one integer
        """
        values = self.tensor(suffix, (torch.uint8, torch.int32, torch.int64), (), (1,))
        return int(values)

    def later(self, suffix: str) -> LaterTensor:
        """Return a tensor that is read on first access."""
        return LaterTensor(self, suffix)

    def error(self, suffix: str, what: str) -> CheckpointError:
        """Return the error to raise for an invalid tensor."""
        name = self.prefix + suffix
        path = self.source.path_of(name)
        return CheckpointError(f"{path}: tensor {shown(name)} {what}", path=path)

    def _require(self, suffix: str) -> None:
        if suffix not in self:
            others = self.source.directory
            raise CheckpointError(
                f"{others}: tensor {shown(self.prefix + suffix)} is missing, without which "
                f"{shown(self.prefix)} cannot be decoded",
                path=others,
            )


class LaterTensor:
    """Reads a tensor on first access and keeps it, for transposed tensors: their columns, the rows of the matrix,
    cannot be read separately.
    """

    def __init__(self, tensors: PackedTensors, suffix: str) -> None:
        self._tensors = tensors
        self._suffix = suffix

    @cached_property
    def value(self) -> Tensor:
        """Return the tensor."""
        return self._tensors.source.stored(self._tensors.prefix + self._suffix)

"""Read a directory of quantized safetensors, and present packed matrices under their original names and shapes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from paged_sdk.errors import CheckpointError, shown
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.weights.quantized.format import PackedMatrix, QuantizedFormat
from paged_sdk.weights.quantized.packed_tensors import PackedTensors
from paged_sdk.weights.safetensors.source import SafetensorsSource

__all__ = ["QuantizedSource"]


class QuantizedSource:
    """Implements a :class:`~paged_sdk.weights.source.WeightSource` over packed tensors.

    The stored tensors decide which matrices are packed; the config's list of unpacked modules is ignored.

    :param stored: the tensors as stored; closed with this source
    :param format_: the format that packs them
    :raises CheckpointError: a tensor that belongs to a packed matrix has no codes beside it
    """

    def __init__(self, stored: SafetensorsSource, format_: QuantizedFormat) -> None:
        self._stored = stored
        self._format = format_
        self._packed: dict[str, PackedTensors] = {}
        self._codes: dict[str, str] = {}
        for name in stored.names():
            if (found := format_.packs(name, stored.dtype(name))) is not None:
                prefix, unpacked = found
                self._packed[unpacked] = PackedTensors(stored, prefix)
                self._codes[unpacked] = name
        prefixes = {tensors.prefix for tensors in self._packed.values()}
        codes = set(self._codes.values())
        others = {name: format_.owner(name) for name in stored.names() if name not in codes}
        for name, owner in others.items():
            if owner is not None and owner not in prefixes:
                path = stored.path_of(name)
                raise CheckpointError(f"{path}: tensor {shown(name)} is there without the codes it is for", path=path)
        self._plain = {name for name, owner in others.items() if owner is None}
        self._known: dict[str, PackedMatrix] = {}

    def names(self) -> Collection[str]:
        """Return the names of all tensors; packed matrices have the names of their unpacked tensors."""
        return self._packed.keys() | self._plain

    def __contains__(self, name: object) -> bool:
        return name in self._packed or name in self._plain

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor: see :meth:`paged_sdk.weights.source.WeightSource.shape`."""
        tensors = self._packed.get(name)
        return self._stored.shape(self._found(name)) if tensors is None else self._checked(name, tensors).shape

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return one tensor: see :meth:`paged_sdk.weights.source.WeightSource.tensor`."""
        tensors = self._packed.get(name)
        if tensors is None:
            return self._stored.tensor(self._found(name), dtype, device)
        matrix = self._checked(name, tensors)
        return matrix.stored().decoded(dtype).to(device).view(matrix.shape)

    def matrix(self, name: str) -> StoredMatrix:
        """Return one matrix: see :meth:`paged_sdk.weights.source.WeightSource.matrix`."""
        tensors = self._packed.get(name)
        return self._stored.matrix(self._found(name)) if tensors is None else self._checked(name, tensors).stored()

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor, or the codes of a packed matrix."""
        return self._stored.path_of(self._codes.get(name, name))

    def close(self) -> None:
        """Close the files; tensors that were read stay valid."""
        self._stored.close()

    def _checked(self, name: str, tensors: PackedTensors) -> PackedMatrix:
        """Return a packed matrix; its tensors are checked on first access."""
        if name not in self._known:
            self._known[name] = self._format.matrix(tensors)
        return self._known[name]

    def _found(self, name: str) -> str:
        """Return the name if it is that of an unpacked tensor of floats or int64 positions.

        :raises CheckpointError: the tensor is missing, holds codes, or has another dtype
        """
        dtype = self._stored.dtype(name)
        # Older image encoders store their patches' position ids in int64, a dtype that no format uses for codes.
        is_number = dtype.is_floating_point and dtype.itemsize >= 2
        if name not in self._plain or not (is_number or dtype == torch.int64):
            path = self._stored.path_of(name)
            raise CheckpointError(
                f"{path}: tensor {shown(name)} has elements of {dtype}, and nothing beside it says what they stand for",
                path=path,
            )
        return name

"""Read importance matrices: how much an error in each column of a model's matrices counts.

That is the mean square of what the column is multiplied by over some text, as llama.cpp's ``llama-imatrix`` writes it:
in GGUF files of the type "imatrix", or in its older binary form (``.imatrix``, ``.dat``).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import CheckpointError, shown
from paged_sdk.logs import get_logger
from paged_sdk.weights.gguf_file import GgufFile
from paged_sdk.weights.weight_file import WeightFile

__all__ = ["ImportanceMatrix", "read_importance"]

_log = get_logger(__name__)

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MOST_ENTRIES: Final = 1 << 18
_LONGEST_NAME: Final = 1 << 12
# Of the mean of a matrix. A column that the text did not use may be used by another.
_LEAST: Final = 1e-3
# What is looked up, and what mostly is not multiplied while a matrix is collected.
_ENDS: Final = frozenset({"token_embd.weight", "output.weight"})


@frozen(eq=False)
class ImportanceMatrix:
    """Holds mean squares of what columns are multiplied by.

    :ivar source: names where they come from, for errors
    :ivar entries: flat float32 by GGUF name of a tensor: the columns of a matrix, or of all experts one after another
    """

    source: str
    entries: Mapping[str, Tensor]

    def of(self, name: str, num_matrices: int, cols: int) -> Tensor | None:
        """Return how much an error in each column counts, float32 ``[num_matrices, cols]``, 1 on average over a matrix;
        None: nothing is known of the tensor.

        :raises CheckpointError: it is of another size
        """
        squares = self.entries.get(name)
        if squares is None:
            return None
        if squares.numel() != num_matrices * cols:
            raise CheckpointError(
                f"{self.source} is of another model: tensor {shown(name)} has {squares.numel()} columns there, "
                f"expected are {num_matrices * cols}"
            )
        squares = squares.view(num_matrices, cols)
        mean = squares.mean(1, keepdim=True)
        # Of experts that no token chose nothing is known.
        relative = torch.where(mean > 0, squares / mean.clamp_min(torch.finfo(torch.float32).tiny), 1.0)
        return relative.clamp_min(_LEAST)

    def must_fit(self, sizes: Mapping[str, tuple[int, int]], wanted: Collection[str]) -> None:
        """Check that the model is the one that this comes from.

        :param sizes: of all of the model's tensors, by GGUF name: how many matrices there are in one, and their columns
        :param wanted: the tensors whose importance will be asked for
        :raises CheckpointError: it is another
        """
        for name in self.entries:
            if name not in sizes and name not in _ENDS:
                raise CheckpointError(f"{self.source} is of another model: tensor {shown(name)} is none of this one")
            if name in sizes:
                self.of(name, *sizes[name])
        missing = [name for name in wanted if name not in self.entries and name not in _ENDS]
        layers = {_layer(name) for name in self.entries}
        foreign = next((name for name in missing if _layer(name) not in layers), None)
        if foreign is not None:
            raise CheckpointError(f"{self.source} is of another model: it has nothing of tensor {shown(foreign)}")
        if missing:
            _log.warning("%s says nothing of %d matrices, such as %s.", self.source, len(missing), missing[0])


def _layer(name: str) -> str:
    return name.split(".")[1] if name.startswith("blk.") else ""


def read_importance(path: Path) -> ImportanceMatrix:
    """Read a file of llama.cpp's, of either form.

    :raises CheckpointError: it is none, is cut off, or holds what no mean square can be
    """
    file = WeightFile(path)
    try:
        is_gguf = file.read(0, min(4, file.size)) == b"GGUF"
        entries = {} if is_gguf else _Legacy(file).entries()
    finally:
        file.close()
    if is_gguf:
        entries = _from_gguf(path)
    for name, squares in entries.items():
        if not bool((squares.isfinite() & (squares >= 0)).all()):
            raise _refused(path, f"the importance of tensor {shown(name)} holds what is no mean square")
    return ImportanceMatrix(source=str(path), entries=entries)


def _from_gguf(path: Path) -> dict[str, Tensor]:
    file = GgufFile(path)
    try:
        kind = file.metadata.get("general.type")
        if kind != "imatrix":
            raise _refused(path, f"it is a GGUF {shown(kind or 'file without a type')}")
        entries: dict[str, Tensor] = {}
        for stored, tensor in file.tensors.items():
            if not stored.endswith(_SUMS):
                continue
            name = stored.removesuffix(_SUMS)
            if name + _COUNTS not in file.tensors:
                raise _refused(path, f"tensor {shown(name)} has sums and no counts")
            sums, counts = tensor.decoded(), file.tensors[name + _COUNTS].decoded().flatten()
            if sums.numel() % counts.numel():
                raise _refused(path, f"tensor {shown(name)} has {counts.numel()} counts of {sums.numel()} sums")
            squares = sums.view(counts.numel(), -1) / counts.clamp_min(1)[:, None]
            entries[name] = squares.flatten()
    finally:
        file.close()
    if not entries:
        raise _refused(path, "it has no sums of squares")
    return entries


class _Legacy:
    """Reads the binary form: a number of entries, and of each its name, a divisor and its numbers; what follows says
    how much text there was.
    """

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self._offset = 0

    def entries(self) -> dict[str, Tensor]:
        count = self._int()
        if not 0 < count <= _MOST_ENTRIES:
            raise self._malformed(f"it would have {count} entries")
        entries: dict[str, Tensor] = {}
        for _ in range(count):
            length = self._int()
            if not 0 < length <= _LONGEST_NAME:
                raise self._malformed(f"a name would have {length} bytes")
            name = self._bytes(length).decode("utf-8", "replace")
            divisor, size = self._int(), self._int()
            if size < 1:
                raise self._malformed(f"tensor {shown(name)} would have {size} numbers")
            squares = torch.frombuffer(bytearray(self._bytes(4 * size)), dtype=torch.float32)
            entries[name] = squares / max(divisor, 1)
        return entries

    def _int(self) -> int:
        (value,) = struct.unpack("<i", self._bytes(4))
        return int(value)

    def _bytes(self, count: int) -> bytes:
        if self._offset + count > self._file.size:
            raise self._malformed("it is cut off")
        data = self._file.read(self._offset, count)
        self._offset += count
        return data

    def _malformed(self, what: str) -> CheckpointError:
        return _refused(self._file.path, what)


def _refused(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is no importance matrix that can be read: {what}", path=path)

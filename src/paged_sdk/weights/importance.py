"""Read and write importance matrices: how much an error in each column of a model's matrices counts.

That is the mean square of what the column is multiplied by over some text, as llama.cpp's ``llama-imatrix`` writes it:
in GGUF files of the type "imatrix", or in its older binary form (``.imatrix``, ``.dat``).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import CheckpointError, shown
from paged_sdk.kernels.quantized.gguf_blocks import tensor_type_of
from paged_sdk.logs import get_logger
from paged_sdk.weights.gguf.file import GgufFile
from paged_sdk.weights.gguf.writer import GgufValue, PlannedTensor, write_gguf_file
from paged_sdk.weights.new_target import new_file
from paged_sdk.weights.weight_file import WeightFile

__all__ = ["ImportanceMatrix", "read_importance", "write_importance"]

_log = get_logger(__name__)

_SUMS, _COUNTS = ".in_sum2", ".counts"
# Of the text that it was collected from: llama.cpp's names.
_TEXTS, _NUM_CHUNKS, _CHUNK_TOKENS = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
_MOST_ENTRIES: Final = 1 << 18
_LONGEST_NAME: Final = 1 << 12
# Of the mean of a matrix. A column that the text did not use may be used by another.
_LEAST: Final = 1e-3
# What is looked up, and what mostly is not multiplied while a matrix is collected.
_ENDS: Final = frozenset({"token_embd.weight", "output.weight"})


@frozen(eq=False, kw_only=True)
class ImportanceMatrix:
    """Holds mean squares of what columns are multiplied by.

    :ivar source: names where they come from, for errors
    :ivar sums: by GGUF name of a tensor, the sums of squares of the columns of each of its matrices, float32
        ``[matrices, columns]``; or of all matrices in one row
    :ivar counts: what sums are divided by, float32 ``[matrices]``
    :ivar counts_tokens: whether counts are numbers of tokens
    :ivar texts: names of what it was collected from
    :ivar num_chunks: the pieces that those were cut into
    """

    source: str
    sums: Mapping[str, Tensor]
    counts: Mapping[str, Tensor]
    counts_tokens: bool = True
    texts: tuple[str, ...] = ()
    num_chunks: int = 0

    def means(self, name: str) -> Tensor:
        """Return the mean squares of a tensor's columns, one of its matrices after another."""
        return (self.sums[name] / self.counts[name].clamp_min(1)[:, None]).flatten()

    def must_count_tokens(self) -> None:
        """Check that others can be added.

        :raises CheckpointError: it does not say how much text there was
        """
        if not self.counts_tokens:
            raise CheckpointError(f"{self.source} cannot be added to: it does not say over how many tokens it is")

    def plus(self, other: ImportanceMatrix) -> ImportanceMatrix:
        """Return the means over both texts.

        :raises CheckpointError: they are of different models, or one does not say how much text there was
        """
        self.must_count_tokens()
        other.must_count_tokens()
        for name in {**self.sums, **other.sums}:
            if not (name in self.sums and name in other.sums and self.sums[name].shape == other.sums[name].shape):
                raise CheckpointError(f"{self.source} and {other.source} are of two models: see tensor {shown(name)}")
        return ImportanceMatrix(
            source=f"{self.source} and {other.source}",
            sums={name: own + other.sums[name] for name, own in self.sums.items()},
            counts={name: own + other.counts[name] for name, own in self.counts.items()},
            texts=(*self.texts, *other.texts),
            num_chunks=self.num_chunks + other.num_chunks,
        )

    def of(self, name: str, num_matrices: int, cols: int, *, only: int | None = None) -> Tensor | None:
        """Return how much an error in each column counts, float32 ``[num_matrices, cols]``, 1 on average over a matrix;
        None: nothing is known of the tensor.

        :param only: the one of the matrices that is asked for, which is returned as ``[1, cols]``; None: all are
        :raises CheckpointError: it is of another size
        """
        if name not in self.sums:
            return None
        squares = self.means(name)
        if squares.numel() != num_matrices * cols:
            raise CheckpointError(
                f"{self.source} is of another model: tensor {shown(name)} has {squares.numel()} columns there, "
                f"expected are {num_matrices * cols}"
            )
        squares = squares.view(num_matrices, cols)
        if only is not None:
            squares = squares[only : only + 1]
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
        for name in self.sums:
            if name not in sizes and name not in _ENDS:
                raise CheckpointError(f"{self.source} is of another model: tensor {shown(name)} is none of this one")
            if name in sizes:
                self.of(name, *sizes[name])
        missing = [name for name in wanted if name not in self.sums and name not in _ENDS]
        layers = {_layer(name) for name in self.sums}
        foreign = next((name for name in missing if _layer(name) not in layers), None)
        if foreign is not None:
            raise CheckpointError(f"{self.source} is of another model: it has nothing of tensor {shown(foreign)}")
        if missing:
            _log.warning("%s says nothing of %d matrices, such as %s.", self.source, len(missing), missing[0])


def write_importance(matrix: ImportanceMatrix, path: Path, *, chunk_tokens: int, setting: str) -> None:
    """Write a matrix in llama.cpp's form, as GGUF. The file is whole or not there.

    :param matrix: one that counts tokens
    :param chunk_tokens: of the pieces that its texts were cut into
    :param setting: what the user names the path by, for errors
    :raises ConfigError: the path exists, its directory does not, or the package gguf is not installed
    :raises CheckpointError: the file cannot be written
    """
    metadata: dict[str, Any] = {
        "general.architecture": "imatrix",
        "general.type": "imatrix",
        _TEXTS: list(matrix.texts),
        _NUM_CHUNKS: matrix.num_chunks,
        _CHUNK_TOKENS: chunk_tokens,
    }
    tensors: list[PlannedTensor] = []
    for name, sums in matrix.sums.items():
        for suffix, values in ((_SUMS, sums), (_COUNTS, matrix.counts[name][:, None])):
            parts = partial(_bytes, values.contiguous())
            tensors.append(
                PlannedTensor(name=name + suffix, shape=tuple(values.shape), type=tensor_type_of("F32"), parts=parts)
            )
    with new_file(path, sum(tensor.num_bytes for tensor in tensors), setting=setting) as part:
        write_gguf_file(part, {key: GgufValue.of(value) for key, value in metadata.items()}, tensors)


def _bytes(values: Tensor) -> Iterator[npt.NDArray[np.uint8]]:
    yield values.view(torch.uint8).numpy().reshape(-1)


def _layer(name: str) -> str:
    return name.split(".")[1] if name.startswith("blk.") else ""


def read_importance(path: Path) -> ImportanceMatrix:
    """Read a file of llama.cpp's, of either form.

    :raises CheckpointError: it is none, is cut off, or holds what no mean square can be
    """
    file = WeightFile(path)
    try:
        is_gguf = file.read(0, min(4, file.size)) == b"GGUF"
        matrix = None if is_gguf else _Legacy(file).matrix()
    finally:
        file.close()
    if matrix is None:
        matrix = _from_gguf(path)
    for name, sums in matrix.sums.items():
        for values in (sums, matrix.counts[name]):
            if not bool((values.isfinite() & (values >= 0)).all()):
                raise _refused(path, f"the importance of tensor {shown(name)} holds what is no mean square")
    return matrix


def _from_gguf(path: Path) -> ImportanceMatrix:
    file = GgufFile(path)
    try:
        kind = file.metadata.get("general.type")
        if kind != "imatrix":
            raise _refused(path, f"it is a GGUF {shown(kind or 'file without a type')}")
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        for stored, tensor in file.tensors.items():
            if not stored.endswith(_SUMS):
                continue
            name = stored.removesuffix(_SUMS)
            if name + _COUNTS not in file.tensors:
                raise _refused(path, f"tensor {shown(name)} has sums and no counts")
            values, count = tensor.decoded(), file.tensors[name + _COUNTS].decoded().flatten()
            if not count.numel() or values.numel() % count.numel():
                raise _refused(path, f"tensor {shown(name)} has {count.numel()} counts of {values.numel()} sums")
            sums[name], counts[name] = values.view(count.numel(), -1), count
        texts, num_chunks = file.metadata.get(_TEXTS), file.metadata.get(_NUM_CHUNKS)
    finally:
        file.close()
    if not sums:
        raise _refused(path, "it has no sums of squares")
    return ImportanceMatrix(
        source=str(path),
        sums=sums,
        counts=counts,
        texts=tuple(map(str, texts)) if isinstance(texts, list) else (),
        num_chunks=num_chunks if isinstance(num_chunks, int) else 0,
    )


class _Legacy:
    """Reads the binary form: a number of entries, and of each its name, a divisor and its numbers; what follows says
    how much text there was.
    """

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self._offset = 0

    def matrix(self) -> ImportanceMatrix:
        count = self._int()
        if not 0 < count <= _MOST_ENTRIES:
            raise self._malformed(f"it would have {count} entries")
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        for _ in range(count):
            length = self._int()
            if not 0 < length <= _LONGEST_NAME:
                raise self._malformed(f"a name would have {length} bytes")
            name = self._bytes(length).decode("utf-8", "replace")
            divisor, size = self._int(), self._int()
            if size < 1:
                raise self._malformed(f"tensor {shown(name)} would have {size} numbers")
            sums[name] = torch.frombuffer(bytearray(self._bytes(4 * size)), dtype=torch.float32)[None]
            counts[name] = torch.tensor([float(max(divisor, 1))])
        return ImportanceMatrix(source=str(self._file.path), sums=sums, counts=counts, counts_tokens=False)

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

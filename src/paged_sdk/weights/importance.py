"""Read and write importance matrices, which weight the quantization error of each column of a weight matrix.

The weight of a column is the mean square of its input activation over a calibration text. The file formats are those of
llama.cpp's ``llama-imatrix``: GGUF of the type "imatrix", or the older binary format (``.imatrix``, ``.dat``).
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
# llama.cpp's keys of the calibration text.
_TEXTS, _NUM_CHUNKS, _CHUNK_TOKENS = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
_MOST_ENTRIES: Final = 1 << 18
_LONGEST_NAME: Final = 1 << 12
# The smallest weight, relative to the matrix's mean: another text may use a column that the calibration text did not.
_LEAST: Final = 1e-3
# Embeddings are looked up, and the output projection is mostly skipped during calibration: either may have no entry.
_ENDS: Final = frozenset({"token_embd.weight", "output.weight"})


@frozen(eq=False, kw_only=True)
class ImportanceMatrix:
    """Holds the mean squares of the input activations of a model's matrices.

    :ivar source: where the values come from, for errors
    :ivar sums: sums of squares by GGUF tensor name, float32 ``[matrices, columns]``, where a tensor of experts has a
        matrix for each; the older format has all matrices in one row
    :ivar counts: the divisors of ``sums``, float32 ``[matrices]``
    :ivar counts_tokens: whether ``counts`` are numbers of tokens
    :ivar texts: names of the calibration texts
    :ivar num_chunks: how many chunks the texts were divided into
    """

    source: str
    sums: Mapping[str, Tensor]
    counts: Mapping[str, Tensor]
    counts_tokens: bool = True
    texts: tuple[str, ...] = ()
    num_chunks: int = 0

    def means(self, name: str) -> Tensor:
        """Return the mean squares of a tensor's columns, flattened: one matrix after another."""
        return (self.sums[name] / self.counts[name].clamp_min(1)[:, None]).flatten()

    def must_count_tokens(self) -> None:
        """Check that another matrix can be added to this one.

        :raises CheckpointError: this matrix does not record its number of tokens
        """
        if not self.counts_tokens:
            raise CheckpointError(f"{self.source} cannot be combined with others: it does not count its tokens")

    def plus(self, other: ImportanceMatrix) -> ImportanceMatrix:
        """Return the matrix over the texts of both.

        :raises CheckpointError: they are for different models, or one does not record its number of tokens
        """
        self.must_count_tokens()
        other.must_count_tokens()
        for name in {**self.sums, **other.sums}:
            if not (name in self.sums and name in other.sums and self.sums[name].shape == other.sums[name].shape):
                raise CheckpointError(
                    f"{self.source} and {other.source} are for different models: see tensor {shown(name)}"
                )
        return ImportanceMatrix(
            source=f"{self.source} and {other.source}",
            sums={name: own + other.sums[name] for name, own in self.sums.items()},
            counts={name: own + other.counts[name] for name, own in self.counts.items()},
            texts=(*self.texts, *other.texts),
            num_chunks=self.num_chunks + other.num_chunks,
        )

    def column_weights(self, name: str, num_matrices: int, cols: int, *, only: int | None = None) -> Tensor | None:
        """Return the weights of a tensor's columns, float32 ``[num_matrices, cols]``, with a mean of 1 over each
        matrix; None if there are no values for the tensor.

        :param only: the index of a single matrix to return, as ``[1, cols]``; None: all matrices
        :raises CheckpointError: the tensor has another size
        """
        if name not in self.sums:
            return None
        squares = self.means(name)
        if squares.numel() != num_matrices * cols:
            raise CheckpointError(
                f"{self.source} is for another model: its tensor {shown(name)} has {squares.numel()} columns, "
                f"expected {num_matrices * cols}"
            )
        squares = squares.view(num_matrices, cols)
        if only is not None:
            squares = squares[only : only + 1]
        mean = squares.mean(1, keepdim=True)
        # An expert that no token was routed to has no statistics: its columns count alike.
        relative = torch.where(mean > 0, squares / mean.clamp_min(torch.finfo(torch.float32).tiny), 1.0)
        return relative.clamp_min(_LEAST)

    def check_model(self, sizes: Mapping[str, tuple[int, int]], wanted: Collection[str]) -> None:
        """Check that this importance matrix was made for the model.

        :param sizes: the number of matrices and of columns of every tensor of the model, by GGUF name
        :param wanted: the tensors that will be quantized
        :raises CheckpointError: it was made for another model
        """
        for name in self.sums:
            if name not in sizes and name not in _ENDS:
                raise CheckpointError(f"{self.source} is for another model: tensor {shown(name)} is not in this one")
            if name in sizes:
                self.column_weights(name, *sizes[name])
        missing = [name for name in wanted if name not in self.sums and name not in _ENDS]
        layers = {_layer(name) for name in self.sums}
        foreign = next((name for name in missing if _layer(name) not in layers), None)
        if foreign is not None:
            raise CheckpointError(f"{self.source} is for another model: it has no values for tensor {shown(foreign)}")
        if missing:
            _log.warning("%s has no values for %d matrices, such as %s.", self.source, len(missing), missing[0])


def write_importance(matrix: ImportanceMatrix, path: Path, *, chunk_tokens: int, setting: str) -> None:
    """Write an importance matrix as llama.cpp's GGUF. The file is created complete or not at all.

    :param matrix: its counts must be numbers of tokens
    :param chunk_tokens: how many tokens a chunk of its texts has
    :param setting: the user's name of the path's setting, for errors
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
    """Read llama.cpp's file, in either format.

    :raises CheckpointError: the file is not an importance matrix, is truncated, or has values that are negative or not
        finite
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
                raise _refused(path, f"tensor {shown(name)} has values that are negative or not finite")
    return matrix


def _from_gguf(path: Path) -> ImportanceMatrix:
    file = GgufFile(path)
    try:
        kind = file.metadata.get("general.type")
        if kind != "imatrix":
            raise _refused(path, f"its general.type must be 'imatrix', found {shown(kind or 'none')}")
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        for stored, tensor in file.tensors.items():
            if not stored.endswith(_SUMS):
                continue
            name = stored.removesuffix(_SUMS)
            if name + _COUNTS not in file.tensors:
                raise _refused(path, f"tensor {shown(name)} has sums but no counts")
            values, count = tensor.decoded(), file.tensors[name + _COUNTS].decoded().flatten()
            if not count.numel() or values.numel() % count.numel():
                raise _refused(path, f"tensor {shown(name)} has {count.numel()} counts for {values.numel()} sums")
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
    """Reads the older binary format: the number of entries, then each entry's name, divisor and values. The trailer,
    which describes the text, is ignored.
    """

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self._offset = 0

    def matrix(self) -> ImportanceMatrix:
        count = self._int()
        if not 0 < count <= _MOST_ENTRIES:
            raise self._malformed(f"it declares {count} entries")
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        for _ in range(count):
            length = self._int()
            if not 0 < length <= _LONGEST_NAME:
                raise self._malformed(f"it declares a name of {length} bytes")
            name = self._bytes(length).decode("utf-8", "replace")
            divisor, size = self._int(), self._int()
            if size < 1:
                raise self._malformed(f"it declares tensor {shown(name)} with {size} values")
            sums[name] = torch.frombuffer(bytearray(self._bytes(4 * size)), dtype=torch.float32)[None]
            counts[name] = torch.tensor([float(max(divisor, 1))], dtype=torch.float32)
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
    return CheckpointError(f"{path} cannot be read as an importance matrix: {what}", path=path)

"""Read the weights of a Hugging Face directory: one safetensors file, or shards with an index."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import torch
from torch import Tensor

from paged_sdk.errors import CheckpointError, ModelLoadError, UnsupportedQuantizationError, shown
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, UnreadRows
from paged_sdk.system.files import is_file, read_json
from paged_sdk.weights.pickles import PICKLE_IS_REFUSED, find_pickle
from paged_sdk.weights.safetensors.file import SafetensorsFile

__all__ = ["SafetensorsSource", "uqff_is_refused"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsSource:
    """Implements a :class:`~paged_sdk.weights.source.WeightSource` over a directory's safetensors files.

    :ivar directory: the checkpoint's directory
    :param directory: contains ``model.safetensors``, or shards and ``model.safetensors.index.json``
    :raises CheckpointError: a file is missing, truncated or malformed, or there are only pickles, which are refused
    :raises UnsupportedQuantizationError: a tensor has an unsupported dtype, or the directory only has UQFF files
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if is_file(directory / _SINGLE):
            file = SafetensorsFile(directory / _SINGLE)
            self._files = dict.fromkeys(file.names(), file)
        elif is_file(directory / _INDEX):
            self._files = self._shards(directory / _INDEX)
        else:
            raise _no_weights(directory)

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._files.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor: see :meth:`paged_sdk.weights.source.WeightSource.shape`."""
        return self._file(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one tensor.

        :raises CheckpointError: there is no tensor of that name
        """
        return self._file(name).dtype(name)

    def path_of(self, name: str) -> Path:
        """Return the file that holds one tensor; for a missing tensor, the directory."""
        return self._files[name].path if name in self._files else self.directory

    def stored(self, name: str) -> Tensor:
        """Return one tensor as it is stored, in memory of its own.

        :raises CheckpointError: there is no tensor of that name, the source is closed, or its file has changed
        """
        return self._file(name).tensor(name)

    def unread_rows(self, name: str) -> UnreadRows:
        """Return one tensor of at least two dimensions, as rows that are read on demand.

        :raises CheckpointError: there is no tensor of that name
        """
        return self._file(name).unread_rows(name)

    def unread_bytes(self, name: str, rows: int) -> UnreadRows:
        """Return the bytes of one tensor as ``rows`` rows that are read on demand.

        :raises CheckpointError: there is no tensor of that name
        """
        return self._file(name).unread_bytes(name, rows)

    def num_bytes(self, name: str) -> int:
        """Return the size of one tensor in bytes.

        :raises CheckpointError: there is no tensor of that name
        """
        return self._file(name).num_bytes(name)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return one tensor: see :meth:`paged_sdk.weights.source.WeightSource.tensor`."""
        return self._file(name).tensor(name).to(device=device, dtype=dtype)

    def matrix(self, name: str) -> DenseMatrix:
        """Return one matrix, always dense: see :meth:`paged_sdk.weights.source.WeightSource.matrix`."""
        return DenseMatrix(self._file(name).unread_rows(name))

    def close(self) -> None:
        """Close the files; tensors that were read stay valid."""
        for file in set(self._files.values()):
            file.close()

    def _file(self, name: str) -> SafetensorsFile:
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self.directory} holds no tensor {shown(name)}", path=self.directory)
        return file

    def _shards(self, index_path: Path) -> dict[str, SafetensorsFile]:
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(_is_file_name(shard) for shard in weight_map.values()):
            raise CheckpointError(f"{index_path}: weight_map must give a file name for every tensor", path=index_path)
        shards = sorted(set(weight_map.values()))
        missing = [shard for shard in shards if not is_file(self.directory / shard)]
        if missing:
            raise CheckpointError(
                f"{self.directory} lacks {_listed(missing)} of {len(shards)} shards: download the checkpoint again",
                path=self.directory,
            )
        files = {shard: SafetensorsFile(self.directory / shard) for shard in shards}
        absent = [name for name, shard in weight_map.items() if name not in files[shard].names()]
        if absent:
            raise CheckpointError(
                f"{index_path} places {_listed(absent)} in shards that do not hold them: download the checkpoint again",
                path=index_path,
            )
        return {name: files[shard] for name, shard in weight_map.items()}


def _is_file_name(value: object) -> bool:
    """Return whether a shard's name is a plain file name, which stays within the directory."""
    return isinstance(value, str) and value != "" and Path(value).name == value


def uqff_is_refused(path: Path) -> UnsupportedQuantizationError:
    """Return the error to raise for UQFF, mistral.rs's own format."""
    return UnsupportedQuantizationError(
        f"{path} is a UQFF file, which mistral.rs alone reads: use the checkpoint it was made from, or a GGUF version",
        path=path,
        quantization="uqff",
        supported=("none", "gguf"),
    )


def _no_weights(directory: Path) -> ModelLoadError:
    suffixes: dict[str, str] = {}
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror or error}", path=directory) from error
    for path in paths:
        suffixes.setdefault(path.suffix, path.name)
    if ".uqff" in suffixes:
        return uqff_is_refused(directory / suffixes[".uqff"])
    if (pickle := find_pickle(suffixes.values())) is not None:
        why = f"it has only {pickle}, {PICKLE_IS_REFUSED}"
    elif ".gguf" in suffixes:
        why = f"it has {suffixes['.gguf']}: give that file's path to load it"
    else:
        why = f"expected {_SINGLE}, or {_INDEX} and its shards"
    return CheckpointError(f"{directory} holds no safetensors weights: {why}", path=directory)


def _listed(names: Iterable[str]) -> str:
    """Join the first few names for a message."""
    first, *rest = names
    return f"{shown(first)} and {len(rest)} more" if rest else f"{shown(first)}"

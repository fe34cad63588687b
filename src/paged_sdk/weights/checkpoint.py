"""Open a checkpoint on disk, its config and its weights, in any supported format."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import frozen

from paged_sdk.errors import CheckpointError
from paged_sdk.system.files import open_file, read_json
from paged_sdk.weights.gguf.source import GgufSource
from paged_sdk.weights.gguf.split import split_parts
from paged_sdk.weights.pickles import PICKLE_IS_REFUSED
from paged_sdk.weights.quantized.format import find_format
from paged_sdk.weights.quantized.source import QuantizedSource
from paged_sdk.weights.safetensors.source import SafetensorsSource, uqff_is_refused
from paged_sdk.weights.source import WeightSource

__all__ = ["Checkpoint", "file_stamps", "open_checkpoint", "refuse_other_files"]

# The first bytes of files by torch.save (zip) and pickle.
_PICKLE_MAGICS = (b"PK\x03\x04", b"\x80")


@frozen(kw_only=True)
class Checkpoint:
    """Holds an open checkpoint.

    :ivar path: the directory, or the GGUF file
    :ivar config: the content of ``config.json``; for GGUF, an equivalent made from the metadata
    :ivar source: the weights; closing it closes the checkpoint
    :ivar is_quantized: whether any matrix is stored quantized
    :ivar metadata: the metadata of a GGUF file, by GGUF key; None for other formats
    """

    path: Path
    config: dict[str, Any]
    source: WeightSource
    is_quantized: bool = False
    metadata: dict[str, Any] | None = None

    @property
    def model_type(self) -> str:
        """Return the config's ``model_type``."""
        return str(self.config.get("model_type"))


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face directory or a GGUF file; weights are read on demand.

    :param path: a directory of ``config.json`` and safetensors files, or a GGUF file (any part of a split one)
    :raises CheckpointError: a file is missing, truncated or malformed, or the weights are pickles, which are refused
    :raises UnsupportedArchitectureError: a GGUF file's architecture is not supported
    :raises UnsupportedQuantizationError: weights are stored in a format that cannot be decoded
    """
    if os.path.isdir(path):  # False for invalid names, too
        stored = SafetensorsSource(path)
        config = read_json(path / "config.json")
        format_ = find_format(config, path)
        source = stored if format_ is None else QuantizedSource(stored, format_)
        return Checkpoint(path=path, config=config, source=source, is_quantized=format_ is not None)
    refuse_other_files(path)
    gguf = GgufSource(path)
    return Checkpoint(
        path=path, config=gguf.config, source=gguf, is_quantized=gguf.is_quantized, metadata=gguf.metadata
    )


def file_stamps(path: Path) -> dict[Path, tuple[int, int]]:
    """Return the checkpoint's existing files, each with its size and modification time in nanoseconds. Equal stamps
    mean an unchanged checkpoint.

    :param path: as for :func:`open_checkpoint`
    """
    if os.path.isdir(path):
        files = [*path.glob("*.safetensors"), *path.glob("*.json")]
    else:
        files = [path.with_name(name) for name in split_parts(path.name)]
    stamps: dict[Path, tuple[int, int]] = {}
    for file in sorted(files):
        with suppress(OSError, ValueError):  # opening the file reports the error
            found = file.stat()
            stamps[file] = found.st_size, found.st_mtime_ns
    return stamps


def refuse_other_files(path: Path) -> None:
    """Refuse a file of a known format other than GGUF, with an error that names the format.

    :raises CheckpointError: the file cannot be read, or is a safetensors file or a pickle
    :raises UnsupportedQuantizationError: the file is in the UQFF format
    """
    with open_file(path) as file:
        head = file.read(8)
    if path.suffix == ".uqff":
        raise uqff_is_refused(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path} holds only weights: load the directory that it is in, with its config.json", path=path
        )
    if head.startswith(_PICKLE_MAGICS):
        raise CheckpointError(f"{path} is {PICKLE_IS_REFUSED}", path=path)

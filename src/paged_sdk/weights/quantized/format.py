"""Define what a format of quantized weights in safetensors is, and find the formats there are."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from attrs import frozen

import paged_sdk.weights.formats
from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError, shown
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.system.files import read_json_if_there
from paged_sdk.weights.quantized.packed_tensors import PackedTensors
from paged_sdk.weights.quantized.settings import FormatSettings

__all__ = ["PackedMatrix", "QuantizedFormat", "as_decoded", "find_format", "find_formats", "without"]

# Where config.json describes the format: MLX has a name of its own beside the usual one.
_SECTIONS = ("quantization_config", "quantization")


@frozen
class PackedMatrix:
    """Describes a matrix that several tensors make up.

    :ivar shape: as the tensor of its values would have it
    :ivar stored: reads what it takes to decode its rows; a shape of more dimensions gives matrices one below the other
    """

    shape: tuple[int, ...]
    stored: Callable[[], StoredMatrix]


class QuantizedFormat(ABC):
    """Reads the matrices that one format packs in safetensors. What it leaves unpacked is read as it is.

    :cvar methods: what ``quant_method`` may be in checkpoints of this format
    """

    methods: ClassVar[tuple[str, ...]]

    @classmethod
    def is_of(cls, settings: FormatSettings) -> bool:
        """Tell whether a checkpoint's config describes this format."""
        return settings.method in cls.methods

    @classmethod
    def open(cls, settings: FormatSettings) -> Self:
        """Return the format as a checkpoint has it whose config describes it.

        :raises CheckpointError: a setting is malformed
        :raises UnsupportedQuantizationError: a setting has a value that is not supported
        """
        return cls()

    @abstractmethod
    def packs(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        """Say whether a tensor holds the codes of a matrix.

        :param name: the tensor's name
        :returns: what the names of the matrix's tensors begin with, and the name that the matrix has unpacked
        """

    @abstractmethod
    def owner(self, name: str) -> str | None:
        """Return what the names of a matrix's tensors begin with, for one that stands beside codes and nowhere else.

        :returns: None: the tensor is not of this kind
        """

    @abstractmethod
    def matrix(self, tensors: PackedTensors) -> PackedMatrix:
        """Check what the file says of a matrix's tensors, without reading them.

        :raises CheckpointError: one is missing, or does not fit the others or the config
        """


def without(name: str, *suffixes: str) -> str | None:
    """Return a name without what it ends in; None: it ends in none of these."""
    suffix = next((each for each in suffixes if name.endswith(each)), None)
    return None if suffix is None else name[: -len(suffix)]


def find_formats() -> tuple[type[QuantizedFormat], ...]:
    """Return every format: each module of :mod:`paged_sdk.weights.formats` holds one, as ``FORMAT``."""
    package = paged_sdk.weights.formats
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(import_module(f"{package.__name__}.{name}").FORMAT for name in names)


def _beside(path: Path) -> object:
    """Return what Model Optimizer's first versions wrote into a file of their own, as config.json has it since."""
    found = read_json_if_there(path / "hf_quant_config.json").get("quantization")
    return {"quant_method": "modelopt", **found} if isinstance(found, dict) else found


def find_format(config: Mapping[str, Any], path: Path) -> QuantizedFormat | None:
    """Return the format that a config describes; None: its weights are not quantized.

    :param config: ``config.json``'s content
    :param path: the checkpoint, for messages
    :raises CheckpointError: a setting is malformed
    :raises UnsupportedQuantizationError: no format is as the config describes it
    """
    section = next((key for key in _SECTIONS if config.get(key) is not None), None)
    values = _beside(path) if section is None else config[section]
    if values is None:
        return None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path / 'config.json'}: {section} = {shown(values)}: expected an object", path=path)
    settings = FormatSettings(values, section or _SECTIONS[0], path)
    formats = find_formats()
    for each in formats:
        if each.is_of(settings):
            return each.open(settings)
    supported = sorted({method for each in formats for method in each.methods})
    raise UnsupportedQuantizationError(
        f"{path} holds weights quantized by {shown(settings.method or 'an unnamed method')}: supported are "
        f"{', '.join(supported)}, and GGUF versions",
        path=path,
        quantization=settings.method,
        supported=(*supported, "gguf"),
    )


def as_decoded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, or a section of one, without what says how matrices are stored: for those who have their
    values.
    """
    kept = {name: value for name, value in config.items() if name not in _SECTIONS}
    return {name: as_decoded(value) if isinstance(value, Mapping) else value for name, value in kept.items()}

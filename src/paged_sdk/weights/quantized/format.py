"""Define the interface of formats of quantized safetensors, and discover the formats."""

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

# The sections of config.json that describe the format: the second is MLX's.
_SECTIONS = ("quantization_config", "quantization")


@frozen
class PackedMatrix:
    """Describes a matrix that is packed in several tensors.

    :ivar shape: the shape of the unpacked tensor
    :ivar stored: reads the scales and the like, and returns the matrix; with more than two dimensions, matrices are
        stacked vertically
    """

    shape: tuple[int, ...]
    stored: Callable[[], StoredMatrix]


class QuantizedFormat(ABC):
    """Reads the matrices that one format packs in safetensors; other tensors are read as they are.

    :cvar methods: the values of ``quant_method`` in checkpoints of this format
    """

    methods: ClassVar[tuple[str, ...]]

    @classmethod
    def is_of(cls, settings: FormatSettings) -> bool:
        """Tell whether a checkpoint's config describes this format."""
        return settings.method in cls.methods

    @classmethod
    def open(cls, settings: FormatSettings) -> Self:
        """Return the format with the settings of a checkpoint's config.

        :raises CheckpointError: a setting is malformed
        :raises UnsupportedQuantizationError: a setting has a value that is not supported
        """
        return cls()

    @abstractmethod
    def packs(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        """Say whether a tensor holds the codes of a matrix.

        :param name: the tensor's name
        :returns: the prefix of the names of the matrix's tensors, and the name of the unpacked matrix; None: the tensor
            holds no codes
        """

    @abstractmethod
    def owner(self, name: str) -> str | None:
        """Return the prefix of the names of a matrix's tensors if this is one that accompanies codes, or None."""

    @abstractmethod
    def matrix(self, tensors: PackedTensors) -> PackedMatrix:
        """Check the dtypes and shapes of a matrix's tensors, without reading their data, and return the matrix.

        :raises CheckpointError: a tensor is missing, or does not fit the others or the config
        """


def without(name: str, *suffixes: str) -> str | None:
    """Return a name without its suffix; None if it has none of these suffixes."""
    suffix = next((each for each in suffixes if name.endswith(each)), None)
    return None if suffix is None else name[: -len(suffix)]


def find_formats() -> tuple[type[QuantizedFormat], ...]:
    """Return every format: each module of :mod:`paged_sdk.weights.formats` holds one, as ``FORMAT``."""
    package = paged_sdk.weights.formats
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(import_module(f"{package.__name__}.{name}").FORMAT for name in names)


def _beside(path: Path) -> object:
    """Return the section from hf_quant_config.json, where Model Optimizer's first versions wrote it."""
    found = read_json_if_there(path / "hf_quant_config.json").get("quantization")
    return {"quant_method": "modelopt", **found} if isinstance(found, dict) else found


def find_format(config: Mapping[str, Any], path: Path) -> QuantizedFormat | None:
    """Return the format that a config describes; None if the weights are not quantized.

    :param config: the content of ``config.json``
    :param path: the checkpoint's directory
    :raises CheckpointError: a setting is malformed
    :raises UnsupportedQuantizationError: the format or a setting is not supported
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
    """Return a config, or a section of one, without its descriptions of quantization, for code that loads decoded
    weights.
    """
    kept = {name: value for name, value in config.items() if name not in _SECTIONS}
    return {name: as_decoded(value) if isinstance(value, Mapping) else value for name, value in kept.items()}

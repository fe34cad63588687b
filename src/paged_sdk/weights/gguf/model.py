"""Read the metadata and tensors that describe the model of a GGUF file, with checks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from attrs import frozen

from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError, shown
from paged_sdk.weights.gguf.names import ARCHITECTURES
from paged_sdk.weights.gguf.tensor import GgufTensor

__all__ = ["LATENT", "OF_LAYER", "WITHOUT_ATTENTION", "GgufModel"]

OF_LAYER: Final = re.compile(r"blk\.(\d{1,9})\.")
"""Matches the start of the name of a layer's tensor: its group is the layer's number."""

LATENT: Final = frozenset({"deepseek2"})
"""Architectures with latent attention, whose heads are described by other keys."""

WITHOUT_ATTENTION: Final = frozenset({"mamba2"})
"""Architectures without attention and MLPs."""

_IN_ALL_LAYERS: Final = MappingProxyType(
    dict.fromkeys(("lfm2", "lfm2moe", "granitehybrid"), "ffn_norm")
    | dict.fromkeys(("falcon-h1", "nemotron_h", "nemotron_h_moe", "mamba2"), "attn_norm")
    | dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), "post_attention_norm")
)
"""A norm that every layer has, of architectures in which only some layers have attention."""

_DIFFER: Final = frozenset({"gemma4", "gemma4-assistant"})
"""Architectures whose layers may have different numbers of heads and sizes of MLPs."""

_ASSISTANTS: Final = frozenset({"gemma4-assistant"})
"""Architectures of models that only draft: by their metadata, all of their layers predict further tokens."""


@frozen
class GgufModel:
    """Reads the metadata and tensors that describe the model of a GGUF file, with checks.

    :ivar metadata: the file's metadata, by GGUF key
    :ivar tensors: the tensors of all parts, by GGUF name
    :ivar path: the file, for errors
    :ivar architecture: the value of ``general.architecture``, which most keys begin with
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    path: Path
    architecture: str

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number >= 0 by a key of the architecture. A list of one value per layer must be uniform."""
        full_key = f"{self.architecture}.{key}"
        value = self.metadata.get(full_key, default)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if isinstance(value, list):
            raise self.unsupported(f"{full_key} that differs from layer to layer")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self.malformed(f"metadata {full_key} is {shown(value)}: expected a number")
        return value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an int by a key of the architecture."""
        value = self.number(key, default)
        if not isinstance(value, int) or value < minimum:
            raise self.malformed(f"metadata {self.architecture}.{key} is {shown(value)}: expected an int >= {minimum}")
        return value

    def of_layers(self, key: str, default: int | None = None) -> list[int]:
        """Return an int for each layer: a list with one of each, of architectures whose layers differ, or the same for
        all.

        :returns: 0 or more each, and more for at least one
        """
        values, differ = self.metadata.get(f"{self.architecture}.{key}"), self.architecture in _DIFFER
        if (self.architecture not in _IN_ALL_LAYERS and not differ) or not isinstance(values, list):
            return [self.integer(key, default)] * self.num_layers
        if len(values) == self.integer("block_count"):
            values = values[: self.num_layers]  # without those that predict further tokens
        is_count = all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values)
        is_allowed = 0 not in values if differ else len({*values} - {0}) == 1
        if not is_count or len(values) != self.num_layers or not is_allowed:
            what = f"one for each of {self.num_layers} layers, {'at least 1' if differ else 'the same or 0'}"
            raise self.malformed(f"metadata {self.architecture}.{key} is {shown(values)}: expected {what}")
        return values

    def windowed(self, period: int | None = None) -> list[bool]:
        """Return whether each layer has a window: a list says so, or a period n, which leaves out every n-th layer.

        :param period: that of files which say neither; None: they are refused
        """
        key = f"{self.architecture}.attention.sliding_window_pattern"
        pattern = self.metadata.get(key, period)
        if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
            return [(layer + 1) % pattern != 0 for layer in range(self.num_layers)]
        is_list = isinstance(pattern, list) and all(isinstance(each, bool | int) and each in (0, 1) for each in pattern)
        if not isinstance(pattern, list) or not is_list or len(pattern) < self.num_layers:
            raise self.malformed(f"metadata {key} is {shown(pattern)}: expected true or false for each layer")
        return list(map(bool, pattern[: self.num_layers]))

    def tensor(self, name: str) -> GgufTensor:
        found = self.tensors.get(name)
        if found is None:
            raise self.malformed(f"it has no tensor {shown(name)}")
        return found

    @property
    def has_experts(self) -> bool:
        return self.integer("expert_count", 0, minimum=0) > 0

    def factors(self, name: str, rotary_dim: int) -> list[float]:
        """Return the values of a tensor that holds a divisor for each rotary frequency."""
        tensor = self.tensor(name)
        if tensor.shape != (rotary_dim // 2,):
            raise self.malformed(f"tensor {shown(name)} has shape {list(tensor.shape)}: expected [{rotary_dim // 2}]")
        divisors: list[float] = tensor.decoded().tolist()
        return divisors

    @property
    def num_layers(self) -> int:
        """Return the number of layers, without those that predict further tokens (MTP), which come last."""
        further = 0 if self.architecture in _ASSISTANTS else self.integer("nextn_predict_layers", 0, minimum=0)
        count = self.integer("block_count") - further
        if count < 1:
            raise self.malformed(f"all of its {count + further} layers are to predict further tokens")
        if further and not any(name.startswith("blk.0.") for name in self.tensors):
            raise self.unsupported("nothing but layers that predict further tokens (MTP)")
        self.tensor(f"blk.{count - 1}.{_IN_ALL_LAYERS.get(self.architecture, 'attn_output')}.weight")
        if count > len(self.tensors):
            raise self.malformed(f"it has {len(self.tensors)} tensors for {count} layers")
        return count

    def check_layers(self) -> None:
        """Refuse a file with tensors of more layers than it says that it has.

        :raises CheckpointError: it has such a tensor
        """
        count = self.integer("block_count")
        for name in self.tensors:
            match = OF_LAYER.match(name)
            if match is not None and int(match[1]) >= count:
                raise self.malformed(f"it has tensor {shown(name)}, and {count} layers by its metadata")

    @property
    def head_dim(self) -> int:
        """Return the size of a head; with latent attention, that of the part that is rotated."""
        if self.architecture in LATENT:
            return self.integer("rope.dimension_count")
        shared = self.integer("embedding_length") // self.integer("attention.head_count")
        # Older llama files only have the rotary dimension, which for llama is the head size.
        fallback = self.integer("rope.dimension_count", shared) if self.architecture == "llama" else shared
        head_dim = self.integer("attention.key_length", fallback)
        if head_dim % 2:
            raise self.malformed(f"its head size {head_dim} is odd")
        if self.integer("attention.value_length", head_dim) != head_dim:
            raise self.unsupported("different head sizes for keys and values")
        return head_dim

    @property
    def rotary_dim(self) -> int:
        """Return how many elements of each head are rotated; most architectures rotate all."""
        return self.integer("rope.dimension_count", self.head_dim)

    def malformed(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} cannot be used: {what}", path=self.path)

    def unsupported(self, what: str) -> UnsupportedArchitectureError:
        return UnsupportedArchitectureError(
            f"{self.path} is a {self.architecture} model with {what}, which is not supported",
            path=self.path,
            architecture=self.architecture,
            supported=ARCHITECTURES,
        )

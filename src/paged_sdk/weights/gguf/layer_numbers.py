"""Read and write a layer's numbers that GGUF has in its metadata, where Hugging Face's checkpoints have tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.errors import CheckpointError, shown
from paged_sdk.weights.gguf.architecture import GgufArchitecture
from paged_sdk.weights.gguf.export_places import CheckpointNames, architecture_of
from paged_sdk.weights.gguf.weight import NumberWeight
from paged_sdk.weights.source import WeightSource, malformed

__all__ = ["number_metadata", "number_weights"]


def number_weights(
    architecture: GgufArchitecture, metadata: Mapping[str, Any], num_layers: int, path: Path
) -> Iterator[tuple[str, NumberWeight]]:
    """Yield the numbers of all layers, by Hugging Face name. As in llama.cpp, one number may stand for all layers.

    :param path: the file with the metadata
    :raises CheckpointError: a list is missing, or does not have a number for each layer
    """
    for key, (own, shape) in architecture.layer_numbers.items():
        found = metadata.get(key)
        values = found if isinstance(found, list) else [found] * num_layers
        is_number = all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)
        if len(values) != num_layers or not is_number:
            what = f"metadata {key} is {shown(found)}: expected a number for each of {num_layers} layers"
            raise CheckpointError(f"{path} cannot be used: {what}", path=path)
        for layer, value in enumerate(values):
            yield f"{architecture.body}{architecture.layers}.{layer}.{own}", NumberWeight(float(value), shape, path)


def number_metadata(source: WeightSource, config: DecoderConfig, names: CheckpointNames) -> dict[str, list[float]]:
    """Return the numbers of all layers, by GGUF key.

    :raises CheckpointError: a layer lacks a number, or has several in its place
    """
    architecture = architecture_of(config)
    return {
        key: [_number(source, f"{names.body}{architecture.layers}.{layer}.{own}") for layer in range(config.num_layers)]
        for key, (own, _) in architecture.layer_numbers.items()
    }


def _number(source: WeightSource, name: str) -> float:
    if (shape := source.shape(name)) not in ((), (1,)):
        raise malformed(source, name, f"tensor {shown(name)} has shape {list(shape)}: expected one number")
    return float(source.tensor(name, torch.float32, torch.device("cpu")))

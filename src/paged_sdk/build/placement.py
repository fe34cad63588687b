"""Decide which device each part of a model is on."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from re import Pattern
from typing import Final

import torch
from attrs import frozen

from paged_sdk.build.topology import expression_of
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.topology import LayerSelector, Topology
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.placement import Placement
from paged_sdk.models.tensor_names import TensorNames
from paged_sdk.runner.device import choose_device, choose_dtype

__all__ = ["PlacedNames", "choose_devices", "common_dtype", "place_model"]

# mistral.rs writes cuda[0] and metal[0].
_INDEX_IN_BRACKETS: Final = re.compile(r"\[(\d+)\]$")


def choose_devices(settings: BuildSettings, own: torch.device | None = None) -> tuple[torch.device, ...]:
    """Return the devices that settings name: the model's default device, then those of its topology.

    :param own: the default device; None: the one in the settings
    :raises ConfigError: a device is unknown, or this machine does not have it
    """
    selectors = () if settings.topology is None else settings.topology.selectors
    there = [_device_of(selector) for selector in selectors if selector.layer.device is not None]
    return tuple(dict.fromkeys((own or choose_device(settings.device), *there)))


def _device_of(selector: LayerSelector) -> torch.device:
    name = selector.layer.device
    assert name is not None
    try:
        return choose_device(re.sub(r"^metal\b", "mps", _INDEX_IN_BRACKETS.sub(r":\1", name)))
    except ConfigError as error:
        raise ConfigError.of("topology", f"{selector}: device {name}", error.allowed) from None


def common_dtype(name: str, devices: Iterable[torch.device]) -> torch.dtype:
    """Return the dtype of that name; "auto" is the devices' common default dtype, or float32 if they differ."""
    suiting = {choose_dtype(name, device) for device in devices}
    return suiting.pop() if len(suiting) == 1 else torch.float32


@frozen
class PlacedNames:
    """Says on which device the tensors of a model are.

    :ivar names: names of the checkpoint's tensors
    :ivar tensor_names: naming scheme of the model's family; None: the model has no family, and is on one device
    """

    placement: Placement
    names: Collection[str]
    tensor_names: TensorNames | None

    def devices_of(self, expression: Pattern[str]) -> tuple[torch.device, ...]:
        """Return the devices of the tensors whose names match an expression."""
        if self.placement.is_one_device or (own := self.tensor_names) is None:
            return self.placement.devices
        layers = self.placement.layers
        named = {name: layers[layer] for name, layer in _layers_of(self.names, own, len(layers)).items()}
        named |= {own.table: self.placement.embedding, f"{own.head}.weight": self.placement.head}
        return tuple(dict.fromkeys(device for name, device in named.items() if expression.search(name)))


def place_model(
    topology: Topology | None,
    device: torch.device,
    *,
    num_layers: int,
    names: Collection[str],
    tensor_names: TensorNames | None,
) -> Placement:
    """Place each layer on the device that the topology sets, or on the default device. Unless the topology selects
    them, the embeddings are with the first layer and the output projection is with the last one.

    :param topology: a topology that matches the model
    :param device: the default device
    :param names: names of the checkpoint's tensors
    :param tensor_names: naming scheme of the model's family; None: the model has no family
    :raises ConfigError: the topology puts one layer, or a model without family, on several devices
    """
    selectors = [] if topology is None else [each for each in topology.by_weight() if each.layer.device is not None]
    rules = [(expression_of(selector), _device_of(selector), selector) for selector in selectors]
    if tensor_names is None:
        elsewhere = next((selector for _, wanted, selector in rules if wanted != device), None)
        if elsewhere is not None:
            allowed = f"the model's device, {device}: what transformers runs is on one device"
            raise ConfigError.of("topology", f"{elsewhere}: device {elsewhere.layer.device}", allowed)
        return Placement.on(device, num_layers)

    def place(name: str, default: torch.device) -> torch.device:
        return next((wanted for expression, wanted, _ in rules if expression.search(name)), default)

    of_layer: dict[int, dict[torch.device, str]] = {}
    in_layers = _layers_of(names, tensor_names, num_layers)
    for name, layer in in_layers.items():
        of_layer.setdefault(layer, {}).setdefault(place(name, device), name)
    for found in of_layer.values():
        if len(found) > 1:
            (first, one), (second, other), *_ = found.items()
            allowed = f"one device for all of a layer, and not {one} on {first} and {other} on {second}"
            raise ConfigError.of("topology", _said(rules, one, other), allowed)
    layers = [next(iter(of_layer.get(layer, {device: ""}))) for layer in range(num_layers)]
    head = f"{tensor_names.head}.weight"
    known = (*in_layers, tensor_names.table, head)
    for expression, _, selector in rules:
        if not any(expression.search(name) for name in known):
            allowed = f"an expression that is found in the name of a tensor of the text model, such as {known[0]}"
            raise ConfigError.of("topology", f"{selector}: device {selector.layer.device}", allowed)
    return Placement(embedding=place(tensor_names.table, layers[0]), layers=tuple(layers), head=place(head, layers[-1]))


def _said(rules: Iterable[tuple[Pattern[str], torch.device, LayerSelector]], *names: str) -> str:
    """Return the first selector with a device that matches one of the names, as text for errors."""
    selector = next(selector for expression, _, selector in rules if any(map(expression.search, names)))
    return f"{selector}: device {selector.layer.device}"


def _layers_of(names: Collection[str], tensor_names: TensorNames, num_layers: int) -> dict[str, int]:
    """Return the layer number of each tensor that belongs to one of the model's layers. Layers that predict further
    tokens (MTP) follow them in checkpoints, and are not loaded.
    """
    found = ((name, tensor_names.layer_of(name)) for name in names)
    return {name: layer for name, layer in found if layer is not None and layer < num_layers}

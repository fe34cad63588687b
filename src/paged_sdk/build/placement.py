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
from paged_sdk.models.family import TensorNames
from paged_sdk.runner.device import choose_device, choose_dtype

__all__ = ["PlacedNames", "choose_devices", "common_dtype", "place_model"]

# mistral.rs writes cuda[0] and metal[0].
_INDEX_IN_BRACKETS: Final = re.compile(r"\[(\d+)\]$")


def choose_devices(settings: BuildSettings, own: torch.device | None = None) -> tuple[torch.device, ...]:
    """Return the devices that settings name: the model's own, and then those of its topology.

    :param own: the model's own; None: the one that its settings name
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
    """Return the dtype of that name; "auto" is what suits all of the devices, else float32."""
    suiting = {choose_dtype(name, device) for device in devices}
    return suiting.pop() if len(suiting) == 1 else torch.float32


@frozen
class PlacedNames:
    """Says on which device the tensors of a model are.

    :ivar names: of the checkpoint's tensors
    :ivar tensor_names: what the model's family calls them; None: it has no family, and one device
    """

    placement: Placement
    names: Collection[str]
    tensor_names: TensorNames | None

    def devices_of(self, expression: Pattern[str]) -> tuple[torch.device, ...]:
        """Return the devices of the tensors in whose names an expression is found."""
        if self.placement.is_one_device or (own := self.tensor_names) is None:
            return self.placement.devices
        named = {name: self.placement.layers[layer] for name, layer in _layers_of(self.names, own).items()}
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
    """Put each layer where a topology has it, with what it says nothing of on the model's own device. Embeddings are
    with the first layer and the output projection with the last one, unless it says something of them.

    :param topology: checked already
    :param device: the model's own
    :param names: of the checkpoint's tensors
    :param tensor_names: what the model's family calls them; None: it has no family
    :raises ConfigError: the parts of one layer are to be on several devices, or the layers of a model without family
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
    in_layers = {name: layer for name, layer in _layers_of(names, tensor_names).items() if layer < num_layers}
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
    """Return the first selector with a device that selects one of some tensors."""
    selector = next(selector for expression, _, selector in rules if any(map(expression.search, names)))
    return f"{selector}: device {selector.layer.device}"


def _layers_of(names: Collection[str], tensor_names: TensorNames) -> dict[str, int]:
    """Return which layer each tensor of a layer is of."""
    number = re.compile(rf"{re.escape(tensor_names.body)}{re.escape(tensor_names.layers)}\.(\d+)\.")
    found = ((name, number.match(name)) for name in names)
    return {name: int(match[1]) for name, match in found if match is not None}

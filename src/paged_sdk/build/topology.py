"""Check a topology against its model, and translate its selectors to tensor names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from re import Pattern
from typing import Final

from paged_sdk.config.isq import IsqType
from paged_sdk.config.topology import LayerSelector, Topology
from paged_sdk.errors import ConfigError
from paged_sdk.quant.isq import blocks_of
from paged_sdk.weights.gguf.mixtures import fitting_type, is_quantizable
from paged_sdk.weights.gguf.names import ARCHITECTURES

__all__ = ["check_topology", "expression_of", "gguf_overrides", "isq_by_name"]

# An output projection tied to the embeddings can be selected too, although the checkpoint has no such tensor.
_HEAD: Final = "lm_head.weight"


def check_topology(topology: Topology, *, num_layers: int, names: Collection[str]) -> None:
    """Check that every selector matches something.

    :param num_layers: number of the model's layers
    :param names: names of the checkpoint's tensors
    :raises ConfigError: naming the selector
    """
    for selector in topology.selectors:
        if isinstance(selector.selection, range):
            _check_range(selector, selector.selection, num_layers)
        else:
            _check_expression(selector, selector.selection, names)


def _check_range(selector: LayerSelector, layers: range, num_layers: int) -> None:
    if layers.stop > num_layers:
        allowed = f"layers below {num_layers}, the number of layers of the model (a range excludes its end)"
        raise ConfigError.of("topology", str(selector), allowed)


def _check_expression(selector: LayerSelector, expression: Pattern[str], names: Collection[str]) -> None:
    if not any(expression.search(name) for name in (*names, _HEAD)):
        example = next((name for name in names if name.endswith("_proj.weight")), _HEAD)
        allowed = f"an expression that is found in the name of a tensor, such as {example}"
        raise ConfigError.of("topology", str(selector), allowed)


def isq_by_name(topology: Topology) -> list[tuple[Pattern[str], IsqType]]:
    """Return a checked topology as pairs of expression and type: the first expression that matches a name decides."""
    return [
        (expression_of(selector), selector.layer.isq)
        for selector in topology.by_weight()
        if selector.layer.isq is not None
    ]


def expression_of(selector: LayerSelector) -> Pattern[str]:
    """Return the regular expression that matches the names of a selector's tensors. Ranges are those of the model's own
    layers, and not of layers for multi-token prediction, which Qwen numbers from 0, too.
    """
    if isinstance(selector.selection, re.Pattern):
        return selector.selection
    return re.compile(rf"^(?!mtp\.)(?:.*\.)?(?:layers|h|blocks)\.(?:{'|'.join(map(str, selector.selection))})\.")


def gguf_overrides(
    topology: Topology, architecture: str, shapes: Mapping[str, tuple[int, ...]], *, num_layers: int
) -> list[tuple[str, str]]:
    """Return a topology's types for a GGUF file, as pairs of an expression for one tensor's name and a type.

    :param architecture: GGUF's name of the architecture
    :param shapes: the shape of each tensor, by GGUF name
    :raises ConfigError: naming the selector, or a type that GGUF has no blocks for
    """
    known = ARCHITECTURES.get(architecture)
    if known is None:
        raise ConfigError.of("topology", architecture, f"an architecture among {', '.join(ARCHITECTURES)}")
    names = {name: known.hugging_face_name(name) or name for name in shapes}
    if topology.devices is not None:
        raise ConfigError.of("topology", f"devices {list(topology.devices)}", "no devices in a file")
    for selector in topology.selectors:
        if selector.layer.device is not None:
            raise ConfigError.of("topology", f"{selector}: device {selector.layer.device}", "no devices in a file")
    check_topology(topology, num_layers=num_layers, names=tuple(names.values()))
    rules = isq_by_name(topology)
    found: list[tuple[str, str]] = []
    for name, own in names.items():
        isq = next((isq for pattern, isq in rules if pattern.search(own)), None)
        if isq is None or not is_quantizable(name, shapes[name]):
            continue
        blocks = blocks_of(isq)
        if blocks is None:
            raise ConfigError.of("topology", isq.value, "a type of GGUF's blocks, Q2K to Q8_1")
        found.append((rf"^{re.escape(name)}$", fitting_type(blocks, shapes[name][-1])))
    return found

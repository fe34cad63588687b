"""Set the quantization and device of single layers, in Python or from a YAML file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import Attribute, evolve, field, frozen

from paged_sdk.config.checks import IsA, IsText, as_tuple, path_text
from paged_sdk.config.isq import IsqType
from paged_sdk.errors import CheckpointError, ConfigError
from paged_sdk.system.files import read_text

if TYPE_CHECKING:
    from yaml import Node

__all__ = ["LayerSelector", "LayerTopology", "Topology"]

_RANGE: Final = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", re.ASCII)
_DEVICES: Final = "the numbers of one or more devices, each once, such as [0, 1]"
_SELECTORS: Final = "a layer such as 5, layers such as 0-8 (8 is not among them), or /a regular expression/"


@frozen
class LayerTopology:
    """Holds settings of layers; None leaves a setting to the model's.

    :param isq: the type to quantize their weights to
    :param device: their device, such as "cpu" or "cuda:1"
    :raises ConfigError: for anything else
    """

    isq: IsqType | None = field(default=None, validator=IsA(IsqType, optional=True))
    device: str | None = field(default=None, validator=IsText(optional=True))


def _is_selection(instance: object, attribute: Attribute[Any], value: object) -> None:
    if isinstance(value, range):
        if not (value.step == 1 and 0 <= value.start < value.stop):
            raise ConfigError.of("topology", value, "a range of at least one layer, in steps of 1, from 0 on")
    elif not isinstance(value, re.Pattern) or not isinstance(value.pattern, str):
        raise ConfigError.of("topology", value, "a range of layers or a compiled regular expression")


@frozen
class LayerSelector:
    """Selects layers, and holds their settings.

    :ivar selection: layer numbers, or a regular expression that is searched in tensor names
    :ivar layer: their settings
    """

    selection: range | re.Pattern[str] = field(validator=_is_selection)
    layer: LayerTopology = field(validator=IsA(LayerTopology))

    def __str__(self) -> str:
        """Return the selector as written in a YAML file."""
        if isinstance(self.selection, range):
            return f"{self.selection.start}-{self.selection.stop}"
        return f"/{self.selection.pattern}/"


def _are_selectors(instance: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(each, LayerSelector) for each in value):
        raise ConfigError.of("topology", value, "what Topology.empty(), with_range and with_regex make")


def _are_devices(instance: object, attribute: Attribute[Any], value: object) -> None:
    if value is None:
        return
    numbers = value if isinstance(value, tuple) else ()
    are_numbers = all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in numbers)
    if not numbers or not are_numbers or len(set(numbers)) < len(numbers):
        raise ConfigError.of("devices", value, _DEVICES)


@frozen
class Topology:
    """Holds settings of single layers. It is immutable: each ``with_*`` returns a new one.

    Precedence: regular expressions before ranges, later expressions before earlier ones; among ranges, the one with the
    higher end, then the later one; all before the model's own settings. What a selector leaves None is taken from the
    next.

    :ivar selectors: in the order in which they were given
    :ivar devices: devices to divide every matrix among; None: as the builder says
    """

    selectors: tuple[LayerSelector, ...] = field(default=(), validator=_are_selectors)
    devices: tuple[int, ...] | None = field(default=None, validator=_are_devices)

    @classmethod
    def empty(cls) -> Topology:
        """Return a topology without settings."""
        return cls()

    @classmethod
    def new(cls, devices: Iterable[int]) -> Topology:
        """Divide every matrix among devices: tensor parallelism, as in :meth:`TextModelBuilder.with_tensor_parallel`.

        :param devices: numbers of GPUs, or on the CPU of NUMA nodes
        :raises ConfigError: anything else, or the same device twice
        """
        if devices is None:
            raise ConfigError.of("devices", devices, _DEVICES)
        return cls(devices=as_tuple(devices))

    def with_range(self, layers: range, layer: LayerTopology) -> Topology:
        """Set the settings of a range of layers.

        :param layers: their numbers, as in ``range(0, 8)``
        :raises ConfigError: no layers, or anything but a range with step 1
        """
        if not isinstance(layers, range):
            raise ConfigError.of("layers", layers, "a range, such as range(0, 8)")
        if not isinstance(layer, LayerTopology):
            raise ConfigError.of("layer", layer, "a LayerTopology")
        return evolve(self, selectors=(*self.selectors, LayerSelector(layers, layer)))

    def with_regex(self, pattern: str | re.Pattern[str], layer: LayerTopology) -> Topology:
        """Set the settings of all matrices whose names match a regular expression.

        :param pattern: searched in Hugging Face's names, such as ``model.layers.0.mlp.down_proj.weight``
        :raises ConfigError: not a regular expression
        """
        if not isinstance(layer, LayerTopology):
            raise ConfigError.of("layer", layer, "a LayerTopology")
        return evolve(self, selectors=(*self.selectors, LayerSelector(_compiled(pattern), layer)))

    @classmethod
    def from_yaml(cls, path: str | PathLike[str]) -> Topology:
        """Read a topology from a file that maps selectors to settings::

            0-8:
              isq: Q3K
              device: cuda:0
            "/down_proj/":
              isq: Q6K

        :param path: the file. A selector is a layer number, a range with an exclusive end, or a regular expression
            between slashes
        :raises ConfigError: the file cannot be read, or has other content
        """
        file = Path(os.path.expanduser(path_text("topology", path, "a path")))
        try:
            text = read_text(file)
        except CheckpointError as error:
            raise ConfigError.of("topology", str(file), f"a file that can be read ({error})") from error
        return cls.from_dict(dict(_entries(text, file)))

    @classmethod
    def from_dict(cls, layers: Mapping[str, Mapping[str, str | None]]) -> Topology:
        """Make a topology from the content of such a file, as in ``Topology.from_dict({"0-8": {"isq": "Q3K"}})``.

        :param layers: settings by selector
        :raises ConfigError: other content
        """
        if not isinstance(layers, Mapping):
            raise ConfigError.of("layers", layers, "selectors, each with isq and device")
        topology = cls.empty()
        for key, entry in layers.items():
            if not isinstance(key, str) or not isinstance(entry, Mapping):
                raise ConfigError.of("layers", {key: entry}, "selectors, each with isq and device")
            topology = _with_selector(topology, key, _layer(entry, key))
        return topology

    def by_weight(self) -> list[LayerSelector]:
        """Return the selectors by precedence, highest first."""
        later_first = self.selectors[::-1]
        ranges = [(each.selection.stop, each) for each in later_first if isinstance(each.selection, range)]
        expressions = [each for each in later_first if not isinstance(each.selection, range)]
        return expressions + [each for _, each in sorted(ranges, key=lambda pair: -pair[0])]


def _compiled(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    try:
        if isinstance(pattern, bytes) or (isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, bytes)):
            raise TypeError("of text, not of bytes")
        return re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise ConfigError.of("pattern", pattern, f"a regular expression ({str(error)[:80]})") from None


def _entries(text: str, file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each selector of a YAML file with its settings, all as text."""
    # Imported here: importing takes 20 ms, and few models have a topology file.
    import yaml

    form = f"selectors, each with isq and device, in {file.name}"
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError.of("topology", str(file), f"YAML ({' '.join(str(error).split())[:200]})") from None
    if root is None:
        return
    selectors = _mapping(root)
    if selectors is None:
        raise ConfigError.of("topology", str(file), form)
    for key, value in selectors.items():
        fields = {} if _text(value) in ("", "null", "~") else _mapping(value)
        if fields is None:
            raise ConfigError.of("topology", key, form)
        texts = {name: each.value for name, each in fields.items() if isinstance(each.value, str)}
        if len(texts) < len(fields):
            raise ConfigError.of("topology", key, form)
        yield key, texts


def _mapping(node: Node) -> dict[str, Node] | None:
    """Return the values of a node by key; None if the node is not a mapping with scalar keys."""
    if not isinstance(node.value, list):
        return None
    found: dict[str, Node] = {}
    for each in node.value:
        if not isinstance(each, tuple):  # an item of a list
            return None
        key, value = each
        name = _text(key)
        if name is None:
            return None
        if name in found:
            raise ConfigError.of("topology", name, "every selector, and every key of one, once")
        found[name] = value
    return found


def _text(node: Node) -> str | None:
    return node.value if isinstance(node.value, str) else None


def _layer(entry: Mapping[str, str | None], key: str) -> LayerTopology:
    says: dict[str, str] = {}
    for name, value in entry.items():
        if name not in ("isq", "device"):
            raise ConfigError.of("topology", f"{key}: {name}", "isq and device of a selector")
        if value is not None and not isinstance(value, str):
            raise ConfigError.of("topology", {key: {name: value}}, "text, such as Q4K")
        if value is not None and value.lower() not in ("", "null", "~"):
            says[name] = value
    isq = says.get("isq")
    return LayerTopology(isq=None if isq is None else IsqType.parse(isq, setting="topology"), device=says.get("device"))


def _with_selector(topology: Topology, key: str, layer: LayerTopology) -> Topology:
    if len(key) > 2 and key[0] == key[-1] == "/":
        try:
            return topology.with_regex(key[1:-1], layer)
        except ConfigError as error:
            raise ConfigError.of("topology", key, error.allowed) from None
    found = _RANGE.fullmatch(key.strip())
    if found is None:
        raise ConfigError.of("topology", key, _SELECTORS)
    first = int(found[1])
    last = first + 1 if found[2] is None else int(found[2])
    if last <= first:
        raise ConfigError.of("topology", key, "a range of at least one layer: its end is not among them")
    return topology.with_range(range(first, last), layer)

"""Define how families of models take images, and find a checkpoint's: a family's file in ``families/`` is named after
Hugging Face's ``model_type``.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

import paged_sdk.vision.families
from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError, shown

__all__ = ["Inputs", "ProcessedImage", "VisionFamily", "find_vision_family", "vision_families"]

Inputs = Mapping[str, npt.NDArray[np.generic]]
"""An image processor's outputs for one image, by name; the first dimension is the batch."""


@frozen(kw_only=True)
class ProcessedImage:
    """Holds the values from which a family determines an image's tokens.

    :ivar inputs: the image processor's outputs
    :ivar config: the content of config.json
    :ivar processor: the content of processor_config.json
    :ivar image_token: text of the token whose embeddings are replaced by the encoder's vectors
    """

    inputs: Inputs
    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    image_token: str

    def setting(self, name: str, *sections: str) -> int:
        """Return a field of the config that must be an integer of at least 1.

        :param sections: names of the nested sections that hold the field
        :raises CheckpointError: the field is missing or has another value
        """
        section: object = self.config
        for key in sections:
            section = section.get(key) if isinstance(section, Mapping) else None
        value = section.get(name) if isinstance(section, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            place = ".".join((*sections, name))
            raise CheckpointError(f"config.json: {place} = {shown(value)}: expected a whole number of at least 1")
        return value


def _no_options(config: Mapping[str, Any]) -> Mapping[str, Any]:  # no lambda: families are pickled
    return {}


@frozen(kw_only=True)
class VisionFamily:
    """Describes how a family takes images; each family's file defines one as ``VISION``.

    :ivar expand: returns the text, mostly special tokens, that replaces an image's placeholder in the prompt
    :ivar options: returns further arguments of the image processor, from config.json
    :ivar processor: makes the image processor from its settings; None: transformers has one that needs only Pillow
    :ivar encoder_inputs: names of the processor's outputs that the encoder takes
    :ivar image_token_fields: names in config.json of the token id whose embeddings are replaced, in order of preference
    :ivar placeholder: text of the token that a chat template writes for an image; None: the token whose embeddings are
        replaced
    :ivar around: text before and after an image, which is tokenized together with the neighbouring text
    :ivar has_grid: whether an image's tokens have rotary positions in height and width
    :ivar is_bidirectional: whether the tokens of an image attend to one another in both directions
    """

    expand: Callable[[ProcessedImage], str]
    options: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _no_options
    processor: Callable[[Mapping[str, Any]], Any] | None = None
    encoder_inputs: tuple[str, ...] = ("pixel_values",)
    image_token_fields: tuple[str, ...] = ("image_token_id", "image_token_index")
    placeholder: str | None = None
    around: str = ""
    has_grid: bool = False
    is_bidirectional: bool = False


def vision_families() -> dict[str, VisionFamily]:
    """Return all families by ``model_type``, sorted."""
    package = paged_sdk.vision.families
    modules = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return {name: import_module(f"{package.__name__}.{name}").VISION for name in modules}


def find_vision_family(config: Mapping[str, Any]) -> VisionFamily:
    """Find the family of a checkpoint by its config.json.

    :raises UnsupportedArchitectureError: no family of that ``model_type`` takes images
    """
    families = vision_families()
    model_type = config.get("model_type")
    family = families.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedArchitectureError(
            f"model_type {shown(model_type)} takes no images here: expected one of {', '.join(families)}",
            architecture=str(model_type),
            supported=families,
        )
    return family

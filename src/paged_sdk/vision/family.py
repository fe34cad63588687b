"""Define how a family of models takes images, and find it: the file name in ``families/`` is Hugging Face's
``model_type``.
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
"""What an image processor has made of one image, by name; the first dimension counts images."""


@frozen(kw_only=True)
class ProcessedImage:
    """Holds what a family may look at to say which tokens stand for an image.

    :ivar inputs: what the encoder will get
    :ivar config: the model's config.json
    :ivar processor: the settings of the processor: processor_config.json's
    :ivar image_token: the text of the token whose embeddings are replaced
    """

    inputs: Inputs
    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    image_token: str

    def setting(self, name: str, *sections: str) -> int:
        """Return a whole number of at least 1 of the config.

        :param sections: the sections that lead to it
        :raises CheckpointError: there is none
        """
        section: object = self.config
        for key in sections:
            section = section.get(key) if isinstance(section, Mapping) else None
        value = section.get(name) if isinstance(section, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            place = ".".join((*sections, name))
            raise CheckpointError(f"config.json: {place} = {shown(value)}: expected a whole number of at least 1")
        return value


def _no_options(config: Mapping[str, Any]) -> Mapping[str, Any]:  # by name: a family may go to another process
    return {}


@frozen(kw_only=True)
class VisionFamily:
    """Describes how a family takes images; each family's file holds one, as ``VISION``.

    :ivar expand: returns the text of special tokens, and of others between them, that takes the place of an image's
        placeholder
    :ivar image_token_fields: the names that config.json has for the token whose embeddings are replaced
    :ivar placeholder: the text of the token that a chat template writes for an image; None: the token whose embeddings
        are replaced
    :ivar options: returns further arguments of the image processor, from config.json
    :ivar encoder_inputs: which of the processor's outputs the encoder takes
    :ivar around: text before and after an image, which is made tokens together with what stands there
    :ivar has_grid: whether an image's tokens have rotary positions in height and width
    :ivar is_whole: whether the tokens of an image attend to one another in both directions
    """

    expand: Callable[[ProcessedImage], str]
    options: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _no_options
    encoder_inputs: tuple[str, ...] = ("pixel_values",)
    image_token_fields: tuple[str, ...] = ("image_token_id", "image_token_index")
    placeholder: str | None = None
    around: str = ""
    has_grid: bool = False
    is_whole: bool = False


def vision_families() -> dict[str, VisionFamily]:
    """Return every family by ``model_type``, in order."""
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

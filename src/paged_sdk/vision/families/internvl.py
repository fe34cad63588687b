"""InternVL 3: tiles of an image between a start and an end token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_sdk.vision.family import ProcessedImage, VisionFamily

__all__ = ["VISION"]


def _expand(image: ProcessedImage) -> str:
    size, patch = (_side(image, name) for name in ("image_size", "patch_size"))
    side = int(size // patch * float(image.config.get("downsample_ratio", 0.5)))
    num_tiles = len(image.inputs["pixel_values"])
    return f"<img>{image.image_token * (side * side * num_tiles)}</img>"


def _side(image: ProcessedImage, name: str) -> int:
    value = image.config["vision_config"][name]
    return int(value[0] if isinstance(value, list) else value)


def _options(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"crop_to_patches": True}


VISION = VisionFamily(expand=_expand, options=_options)

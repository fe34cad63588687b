"""Mistral 3: Pixtral's rows of patches, with squares of patches merged into one vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_sdk.vision.family import ProcessedImage, VisionFamily
from paged_sdk.vision.rows import rows_of_patches

__all__ = ["VISION"]


def _options(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"patch_size": config["vision_config"]["patch_size"] * config.get("spatial_merge_size", 2)}


def _expand(image: ProcessedImage) -> str:
    return rows_of_patches(
        image, image.setting("patch_size", "vision_config") * int(image.config.get("spatial_merge_size", 2))
    )


VISION = VisionFamily(expand=_expand, options=_options, encoder_inputs=("pixel_values", "image_sizes"))

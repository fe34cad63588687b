"""LLaVA (Liu et al., 2023, arXiv 2304.08485): a vector per patch. Pixtral has its ``model_type``, with row tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_sdk.vision.family import ProcessedImage, VisionFamily
from paged_sdk.vision.rows import rows_of_patches

__all__ = ["VISION"]


def _expand(image: ProcessedImage) -> str:
    patch = image.setting("patch_size", "vision_config")
    vision = image.config["vision_config"]
    if _is_pixtral(image.config):
        return rows_of_patches(image, patch)
    height, width = image.inputs["pixel_values"].shape[-2:]
    # CLIP-like encoders have a class token before the patches. The strategy "default" drops the first vector, "full"
    # keeps it; SigLIP has no class token, so that "default" drops a patch.
    has_class_token = vision.get("model_type") != "siglip_vision_model"
    keeps_it = image.config.get("vision_feature_select_strategy", "default") == "full"
    drops_one = not has_class_token and not keeps_it
    num_tokens = (height // patch) * (width // patch) + (has_class_token and keeps_it) - drops_one
    return image.image_token * int(num_tokens)


def _is_pixtral(config: Mapping[str, Any]) -> bool:
    return bool(config["vision_config"].get("model_type") == "pixtral")


def _options(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"patch_size": config["vision_config"]["patch_size"]} if _is_pixtral(config) else {}


VISION = VisionFamily(expand=_expand, options=_options, encoder_inputs=("pixel_values", "image_sizes"))

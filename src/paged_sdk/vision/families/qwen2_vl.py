"""Qwen2-VL (Wang et al., 2024, arXiv 2409.12191): images of any size, with rotary positions in height and width."""

from __future__ import annotations

from paged_sdk.vision.family import ProcessedImage, VisionFamily

__all__ = ["VISION"]


def _expand(image: ProcessedImage) -> str:
    merge = image.setting("spatial_merge_size", "vision_config")
    return image.image_token * (int(image.inputs["image_grid_thw"][0].prod()) // merge**2)


VISION = VisionFamily(expand=_expand, encoder_inputs=("pixel_values", "image_grid_thw"), has_grid=True)

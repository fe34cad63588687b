"""Gemma 4 (2026): images of many aspect ratios; a number of tokens that the processor decides, between two marks."""

from __future__ import annotations

from paged_sdk.vision.family import ProcessedImage, VisionFamily

__all__ = ["VISION"]


def _expand(image: ProcessedImage) -> str:
    return f"<|image>{image.image_token * int(image.inputs['num_soft_tokens_per_image'][0])}<image|>"


VISION = VisionFamily(expand=_expand, encoder_inputs=("pixel_values", "image_position_ids"))

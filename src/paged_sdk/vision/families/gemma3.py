"""Gemma 3 (2025, arXiv 2503.19786): fixed image size; an image's tokens attend to one another in both directions."""

from __future__ import annotations

from paged_sdk.vision.family import ProcessedImage, VisionFamily

__all__ = ["VISION"]


def _expand(image: ProcessedImage) -> str:
    return f"<start_of_image>{image.image_token * image.setting('mm_tokens_per_image')}<end_of_image>"


VISION = VisionFamily(expand=_expand, placeholder="<start_of_image>", around="\n\n", is_bidirectional=True)

"""Idefics 3 (Laurencon et al., 2024, arXiv 2408.12637): tiles of an image, row by row, then the downscaled image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_sdk.vision.family import ProcessedImage, VisionFamily

__all__ = ["VISION"]

_AROUND = "<fake_token_around_image>"


def _expand(image: ProcessedImage) -> str:
    patches = image.setting("image_size", "vision_config") // image.setting("patch_size", "vision_config")
    tile = image.image_token * (patches // image.setting("scale_factor")) ** 2
    rows, columns = (int(image.inputs[name][0][0]) for name in ("rows", "cols"))
    lines = [
        "".join(f"{_AROUND}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    ]
    if lines:
        lines.append("\n")
    return "".join(lines) + f"{_AROUND}<global-img>{tile}{_AROUND}"


def _options(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"return_row_col_info": True}


VISION = VisionFamily(
    expand=_expand,
    options=_options,
    encoder_inputs=("pixel_values", "pixel_attention_mask"),
)

"""LFM2-VL (2025, arXiv 2511.23404): an image, or tiles of it row by row and then the downscaled image."""

from __future__ import annotations

from paged_sdk.vision.family import ProcessedImage, VisionFamily
from paged_sdk.vision.lfm2_images import Lfm2Images

__all__ = ["VISION"]


def _expand(image: ProcessedImage) -> str:
    factor = int(image.config.get("downsample_factor", 2))
    parts = [image.image_token * (height * width // factor**2) for height, width in image.inputs["spatial_shapes"]]
    rows, columns = (int(image.inputs[name][0]) for name in ("image_rows", "image_cols"))
    if not image.processor.get("use_image_special_tokens", True):
        return "".join(parts)
    if rows * columns > 1:
        places = [(row, column) for row in range(1, rows + 1) for column in range(1, columns + 1)]
        marks = [f"<|img_row_{row}_col_{column}|>" for row, column in places] + ["<|img_thumbnail|>"]
        parts = [mark + part for mark, part in zip(marks, parts, strict=False)]  # there may be no thumbnail
    return f"<|image_start|>{''.join(parts)}<|image_end|>"


VISION = VisionFamily(
    expand=_expand,
    processor=Lfm2Images.of,
    encoder_inputs=("pixel_values", "pixel_attention_mask", "spatial_shapes"),
)

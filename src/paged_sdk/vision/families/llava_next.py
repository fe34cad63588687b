"""LLaVA-NeXT: the downscaled image, then tiles without their padding, with a vector after each row of patches."""

from __future__ import annotations

from paged_sdk.vision.family import ProcessedImage, VisionFamily

__all__ = ["VISION"]


def _expand(image: ProcessedImage) -> str:
    patch = image.setting("patch_size", "vision_config")
    side = int(image.inputs["pixel_values"].shape[-1]) // patch  # patches of a tile in height and width
    height, width = (int(size) for size in image.inputs["image_sizes"][0])
    grids = [(int(rows), int(columns)) for rows, columns in image.config["image_grid_pinpoints"]]
    tile = image.setting("image_size", "vision_config")
    best_height, best_width = _best_resolution(height, width, grids)
    rows, columns = side * (best_height // tile), side * (best_width // tile)
    # The image is scaled to fit the grid of tiles; patches of the padding are left out.
    if width / height > columns / rows:
        rows -= 2 * ((rows - int(round(height * (columns / width), 7))) // 2)
    else:
        columns -= 2 * ((columns - int(round(width * (rows / height), 7))) // 2)
    return image.image_token * (side * side + rows * columns + rows)


def _best_resolution(height: int, width: int, grids: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the grid in which the scaled image keeps the most pixels; of equals, the one with the least padding."""

    def rank(grid: tuple[int, int]) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        return used, used - grid[0] * grid[1]

    return max(grids, key=rank)


VISION = VisionFamily(expand=_expand, encoder_inputs=("pixel_values", "image_sizes"))

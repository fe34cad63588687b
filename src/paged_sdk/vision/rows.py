"""Write an image's tokens as rows of patches, with a token between rows, as Pixtral does."""

from __future__ import annotations

from paged_sdk.vision.family import ProcessedImage

__all__ = ["rows_of_patches"]


def rows_of_patches(image: ProcessedImage, patch: int) -> str:
    """Return the token text of an image of any size.

    :param patch: side of the square of pixels that one vector represents
    """
    height, width = (int(side) for side in image.inputs["image_sizes"][0])
    row = image.image_token * (width // patch)
    mark = str(image.processor.get("image_break_token", "[IMG_BREAK]"))
    end = str(image.processor.get("image_end_token", "[IMG_END]"))
    return mark.join([row] * (height // patch)) + end

"""Write an image as rows of patches, with a mark after each row: Pixtral's form."""

from __future__ import annotations

from paged_sdk.vision.family import ProcessedImage

__all__ = ["rows_of_patches"]


def rows_of_patches(image: ProcessedImage, patch: int) -> str:
    """Return the tokens of an image whose size may be any.

    :param patch: the side of the square that one vector stands for, in pixels
    """
    height, width = (int(side) for side in image.inputs["image_sizes"][0])
    row = image.image_token * (width // patch)
    mark = str(image.processor.get("image_break_token", "[IMG_BREAK]"))
    end = str(image.processor.get("image_end_token", "[IMG_END]"))
    return mark.join([row] * (height // patch)) + end

"""Decode images within limits; the size in a file's header is checked before its pixels are decoded."""

from __future__ import annotations

import io
import warnings
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_sdk.config.images import ImageLimits
from paged_sdk.errors import InvalidRequestError
from paged_sdk.types.image import Image

__all__ = ["decode"]

_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's other formats are obsolete, or decoded by external programs."""


def decode(image: Image, limits: ImageLimits) -> npt.NDArray[np.uint8]:
    """Return an image's RGB pixels, rotated by its EXIF orientation, ``[height, width, 3]``.

    :raises InvalidRequestError: the image is of no known format, broken, animated, or larger than the limits
    """
    if image.shape is not None:
        return _from_pixels(image, limits)
    import PIL.Image
    import PIL.ImageOps

    if len(image.data) > limits.max_bytes:
        raise InvalidRequestError.of("image", f"{len(image.data)} bytes", f"at most max_bytes = {limits.max_bytes}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's warning about large images: _check_size has the limit
            with PIL.Image.open(io.BytesIO(image.data), formats=_FORMATS) as opened:
                _check_size(*opened.size[::-1], limits)
                if (num_frames := getattr(opened, "n_frames", 1)) > 1:
                    allowed = "one frame: animated images are not supported"
                    raise InvalidRequestError.of("image", f"{num_frames} frames", allowed)
                return np.array(PIL.ImageOps.exif_transpose(opened).convert("RGB"), np.uint8)
    except InvalidRequestError:
        raise
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises anything for a malformed file
        known = ", ".join(_FORMATS)
        raise InvalidRequestError(
            f"the image cannot be read as one of {known}: {_reason(error)}", field="image", allowed=f"one of {known}"
        ) from error


def _reason(error: Exception) -> str:
    text = str(error)
    # Pillow's own text has the address of the BytesIO object.
    return "it is none of them" if "cannot identify" in text else text[:200] or type(error).__name__


def _check_size(height: int, width: int, limits: ImageLimits) -> None:
    if not 0 < height * width <= limits.max_pixels:
        allowed = f"from 1 to max_pixels = {limits.max_pixels} pixels"
        raise InvalidRequestError.of("image", f"{height} x {width} pixels", allowed)


def _from_pixels(image: Image, limits: ImageLimits) -> npt.NDArray[np.uint8]:
    assert image.shape is not None
    height, width, channels = image.shape
    _check_size(height, width, limits)
    pixels: npt.NDArray[Any] = np.frombuffer(image.data, np.uint8).reshape(image.shape)
    if channels == 1:
        pixels = np.repeat(pixels, 3, axis=2)
    return np.ascontiguousarray(pixels[:, :, :3])

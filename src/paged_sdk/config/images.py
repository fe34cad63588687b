"""Limit the number and size of images."""

from __future__ import annotations

from attrs import field, frozen

from paged_sdk.config.checks import IntAtLeast, as_int

__all__ = ["ImageLimits"]


@frozen(kw_only=True)
class ImageLimits:
    """Limits the images of a request. They are checked against the file's header, before an image is decoded.

    :ivar max_images: maximum number of images per request
    :ivar max_pixels: maximum number of pixels per image, height times width
    :ivar max_bytes: maximum file size of an image in bytes
    :raises ConfigError: a limit below 1
    """

    max_images: int = field(default=64, converter=as_int, validator=IntAtLeast(1))
    max_pixels: int = field(default=50_000_000, converter=as_int, validator=IntAtLeast(1))
    max_bytes: int = field(default=1 << 26, converter=as_int, validator=IntAtLeast(1))

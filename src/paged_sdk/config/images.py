"""Say how large and how many images may be."""

from __future__ import annotations

from attrs import field, frozen

from paged_sdk.config.checks import IntAtLeast, as_int

__all__ = ["ImageLimits"]


@frozen(kw_only=True)
class ImageLimits:
    """Limits the images of a request. They are checked before an image is decoded, from what its file says of itself.

    :ivar max_images: the most images of a request
    :ivar max_pixels: the most pixels of an image, height times width
    :ivar max_bytes: the most bytes of an image's file
    :raises ConfigError: a limit below 1
    """

    max_images: int = field(default=64, converter=as_int, validator=IntAtLeast(1))
    max_pixels: int = field(default=50_000_000, converter=as_int, validator=IntAtLeast(1))
    max_bytes: int = field(default=1 << 26, converter=as_int, validator=IntAtLeast(1))

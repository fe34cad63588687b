"""Hold an image of a message: the bytes of a file, or pixels. Nothing is decoded here."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping
from functools import cached_property
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from attrs import field, frozen

from paged_sdk.errors import CheckpointError, InvalidRequestError, shortened
from paged_sdk.system.files import open_file

__all__ = ["Image", "ImageLike", "image_of_part"]

MAX_IMAGE_BYTES = 1 << 26
"""Largest image file: 64 MiB. A photograph of 48 megapixels has 12 MB as JPEG."""

_ALLOWED = (
    "a PIL image, a path, the bytes of a file, a data URL, or a numpy array of uint8 [height, width(, 1, 3 or 4)]"
)
_DATA_URL = re.compile(r"data:[\w.+-]*/?[\w.+-]*(?:;[\w.+-]+=[^;,]*)*;base64,", re.ASCII)


class _PilImage(Protocol):
    """Lists the members used of a PIL image."""

    @property
    def size(self) -> tuple[int, int]: ...

    @property
    def mode(self) -> str: ...

    def convert(self, mode: str, /) -> Any: ...

    def tobytes(self) -> bytes: ...


class _PixelArray(Protocol):
    """Lists the members used of a numpy array."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def tobytes(self) -> bytes: ...


@frozen(slots=False)  # the cached digest needs a __dict__
class Image:
    """Holds an image. Two images of the same bytes are equal.

    :ivar data: the bytes of a file, or 8-bit pixels in row-major order
    :ivar shape: height, width and channels (1, 3 or 4) of pixels; None: the bytes are a file's
    """

    data: bytes = field(repr=lambda data: f"<{len(data)} bytes>")
    shape: tuple[int, int, int] | None = None

    def __attrs_post_init__(self) -> None:
        data: object = self.data
        if type(data) is not bytes:
            raise InvalidRequestError.of("data", data, "bytes")
        if self.shape is None:
            _bounded(self.data)
            return
        shape: object = self.shape
        fits = isinstance(shape, tuple) and len(shape) == 3 and all(type(size) is int and size > 0 for size in shape)
        if not fits or self.shape[2] not in (1, 3, 4) or math.prod(self.shape) != len(self.data):
            allowed = f"height, width and channels (1, 3 or 4) of {len(self.data)} bytes"
            raise InvalidRequestError.of("shape", shape, allowed)

    @cached_property
    def digest(self) -> bytes:
        """Return a hash that identifies the image: the SHA-256 of its bytes and shape."""
        return sha256(repr(self.shape).encode() + self.data).digest()

    @classmethod
    def parse(cls, image: ImageLike) -> Image:
        """Read an image in any accepted form; a path is read now.

        :raises InvalidRequestError: anything else, a file that cannot be read or is larger than 64 MiB, or a URL other
            than ``data:``, which is never fetched
        """
        if isinstance(image, cls):
            return image
        if isinstance(image, bytes | bytearray | memoryview):
            return cls(_bounded(bytes(image)))
        if isinstance(image, str) and image.startswith("data:"):
            return cls(_decode(image))
        if isinstance(image, str | PathLike):
            return cls(_read(image))
        if all(hasattr(image, name) for name in ("mode", "size", "convert", "tobytes")):
            return _from_pil(image)
        if all(hasattr(image, name) for name in ("dtype", "shape", "tobytes")):
            return _from_array(image)
        raise _refused(image)


ImageLike: TypeAlias = Image | _PilImage | _PixelArray | str | PathLike[str] | bytes | bytearray | memoryview
"""An :class:`Image`, a PIL image, a path, the bytes of an image file, a ``data:`` URL, or a numpy array of uint8."""


def image_of_part(part: Mapping[str, Any]) -> Image | None:
    """Read an image part of a message's content, in OpenAI's form ``{"type": "image_url", "image_url": {"url":
    "data:..."}}`` or the form of Hugging Face's templates, ``{"type": "image", "image": ...}``; return None for any
    other part.

    Parts often come from untrusted clients, so a path in one is never read.

    :raises InvalidRequestError: as :meth:`Image.parse`, and for a path
    """
    kind = part.get("type")
    value: Any
    if kind == "image_url":
        url = part.get("image_url")
        value = url.get("url") if isinstance(url, Mapping) else url
    elif kind == "image":
        value = part.get("image", part.get("url"))
    else:
        return None
    if isinstance(value, PathLike) or (isinstance(value, str) and not value.startswith("data:")):
        raise InvalidRequestError.of("image", value, "a data: URL in a message's parts, no path or address")
    return Image.parse(value)


def _refused(value: object) -> InvalidRequestError:
    return InvalidRequestError.of("image", value, _ALLOWED)


def _bounded(data: bytes) -> bytes:
    if not 0 < len(data) <= MAX_IMAGE_BYTES:
        raise InvalidRequestError.of("image", f"{len(data)} bytes", f"from 1 to {MAX_IMAGE_BYTES} bytes")
    return data


def _decode(url: str) -> bytes:
    head = _DATA_URL.match(url)
    if head is None or len(url) > 2 * MAX_IMAGE_BYTES:
        raise InvalidRequestError.of("image", url[:80], "data:image/...;base64,... of at most 64 MiB")
    try:
        return _bounded(base64.b64decode(url[head.end() :], validate=True))
    except (binascii.Error, ValueError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError.of("image", url[:80], "a data URL whose base64 is whole") from error


def _read(path: str | PathLike[str]) -> bytes:
    if isinstance(path, str) and re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", path):
        raise InvalidRequestError.of("image", path, "a path or a data: URL: other addresses are not fetched")
    try:
        with open_file(Path(path)) as file:
            return _bounded(file.read(MAX_IMAGE_BYTES + 1))
    except CheckpointError as error:
        raise InvalidRequestError(f"the image {shortened(str(error))}", field="image", value=str(path)) from error


def _from_pil(image: Any) -> Image:
    if getattr(image, "n_frames", 1) > 1:
        raise InvalidRequestError.of("image", f"{image.n_frames} frames", "one frame: choose one of the animation")
    try:
        rgb = image.convert("RGB")
        width, height = rgb.size
        return Image(_bounded_pixels(height, width, 3, rgb.tobytes()), (height, width, 3))
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"the image cannot be read: {error}", field="image") from error


def _from_array(array: Any) -> Image:
    shape = tuple(int(size) for size in array.shape)
    if str(array.dtype) != "uint8" or len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 3, 4)):
        raise InvalidRequestError.of("image", f"{array.dtype} {shape}", _ALLOWED)
    height, width = shape[:2]
    channels = shape[2] if len(shape) == 3 else 1
    return Image(_bounded_pixels(height, width, channels, array.tobytes()), (height, width, channels))


def _bounded_pixels(height: int, width: int, channels: int, data: bytes) -> bytes:
    if not height or not width or height * width * channels > 16 * MAX_IMAGE_BYTES:
        raise InvalidRequestError.of("image", f"{height} x {width} pixels", "at least one pixel and at most 1 GiB")
    return data

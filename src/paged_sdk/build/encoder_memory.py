"""Measures the device memory that encoding images needs, before the KV pool takes the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch

from paged_sdk.build.step_memory import workspace_bytes
from paged_sdk.build.vision import LoadedVision
from paged_sdk.config.images import ImageLimits
from paged_sdk.errors import InvalidRequestError
from paged_sdk.guard import clear_frames
from paged_sdk.logs import get_logger
from paged_sdk.runner.activations import cuda_peak_bytes
from paged_sdk.runner.device import device_memory, is_lack_of_memory
from paged_sdk.runner.image_queue import MOST_BYTES
from paged_sdk.types.image import Image
from paged_sdk.vision.family import Inputs
from paged_sdk.vision.processor import ImagePrompts

__all__ = ["encoder_bytes", "largest_inputs"]

_log = get_logger(__name__)

_LEAST_PIXELS: Final = 1 << 16
_RATIOS: Final = (1.0, 4 / 3)
"""Aspect ratios to try, width by height: processors that cut images into tiles have the most tiles for a square, or for
three rows of four."""
_GROWTH: Final = 1.1
"""Minimum growth of the encoder's input that counts as growth; less is due to rounding to patches."""
_PATIENCE: Final = 2
"""Doublings of the number of pixels without growth after which the search ends: going from one tile to two by two may
take four times the pixels."""


def encoder_bytes(
    device: torch.device, vision: LoadedVision, limits: ImageLimits, *, max_tokens: int, reserved: int = 0
) -> int:
    """Measure the bytes that images need on a CUDA device: the peak of encoding the largest image (one is encoded at a
    time), the cached vectors, and the workspace of the encoder's stream.

    The result is at most half of the free memory, so that images larger than a user ever sends do not displace the KV
    pool.

    :param limits: limits of a request's images
    :param max_tokens: maximum number of tokens of a prompt
    :param reserved: bytes of the free memory that steps need
    """
    most, needed = max(device_memory(device).free - reserved, 0) // 2, 0
    inputs = largest_inputs(vision.prompts, limits, max_tokens)
    if inputs is None:
        return 0
    try:
        with torch.inference_mode():
            peak = cuda_peak_bytes(device)(lambda: _encode(vision, inputs))
        needed = peak + MOST_BYTES + workspace_bytes()
    except Exception as error:  # encoders may raise anything; requests report it
        clear_frames(error)
        torch.cuda.empty_cache()
        if not is_lack_of_memory(error):
            _log.warning("No picture could be encoded for trial: %r", error)
            return 0
    if 0 < needed <= most:
        _log.info("Left free on %s for images: %.1f MiB.", device, needed / 2**20)
        return needed
    _log.warning(
        "The largest image that may be sent needs %s on %s, for which %.1f are left free: it may be refused beside "
        "other work. with_image_limits(ImageLimits(max_pixels=...)) allows smaller ones alone.",
        f"{needed / 2**20:.1f} MiB" if needed else "more memory than there is",
        device,
        most / 2**20,
    )
    return most


def largest_inputs(prompts: ImagePrompts, limits: ImageLimits, max_tokens: int) -> Inputs | None:
    """Return the encoder's inputs for the largest image allowed; None if the processor refuses all images tried.

    :param max_tokens: images with more tokens do not count: they fit no prompt
    """
    largest: Inputs | None = None
    for ratio in _RATIOS:
        last = num_alike = 0
        for pixels in _sizes(limits.max_pixels):
            height = max(int((pixels / ratio) ** 0.5), 1)
            picture = np.full((height, max(int(height * ratio), 1), 3), 128, dtype=np.uint8)
            try:
                num_tokens, inputs = prompts.measure(Image.parse(picture))
            except InvalidRequestError:  # the image is too small, or the processor refuses its shape
                continue
            size = _num_bytes(inputs)
            num_alike = 0 if size >= last * _GROWTH else num_alike + 1
            if num_tokens > max_tokens or num_alike == _PATIENCE:
                break
            last = max(last, size)
            if largest is None or size > _num_bytes(largest):
                largest = inputs
    return largest


def _sizes(most: int) -> Iterator[int]:
    pixels = min(_LEAST_PIXELS, most)
    while pixels < most:
        yield pixels
        pixels *= 2
    yield most


def _num_bytes(inputs: Inputs) -> int:
    return sum(array.nbytes for array in inputs.values())


def _encode(vision: LoadedVision, inputs: Inputs) -> None:
    vision.encoder.encode(inputs, lambda: None)

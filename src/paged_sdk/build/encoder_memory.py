"""Measures what encoding images needs of a device's memory, before the KV pool takes what is left."""

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
"""Widths by heights that are tried: of those that cut images into tiles, some have the most for a square, others for
three rows of four."""
_GROWTH: Final = 1.1
"""What the encoder takes grows by this factor at least, or not at all: patches are rounded."""
_PATIENCE: Final = 2
"""So often it does not grow with twice the pixels before it grows no more: from one tile to two times two, pixels may
have to be four times as many."""


def encoder_bytes(
    device: torch.device, vision: LoadedVision, limits: ImageLimits, *, max_tokens: int, reserved: int = 0
) -> int:
    """Measure the bytes that images need on a CUDA device: what encoding the largest one takes, one being encoded at a
    time, the vectors that are kept, and a workspace of the encoder's stream. They are half of what is free at most: the
    largest image may need more than a model for which a user has smaller ones could spare.

    :param limits: of a request's images
    :param max_tokens: the most tokens that a prompt may have
    :param reserved: bytes of what is free that steps need
    """
    most, needed = max(device_memory(device).free - reserved, 0) // 2, 0
    inputs = largest_inputs(vision.prompts, limits, max_tokens)
    if inputs is None:
        return 0
    try:
        with torch.inference_mode():
            peak = cuda_peak_bytes(device)(lambda: _encode(vision, inputs))
        needed = peak + MOST_BYTES + workspace_bytes()
    except Exception as error:  # whatever an encoder raises: of a failure, requests will tell
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
    """Return what the encoder takes of the largest image that it may get; None: it takes none of the images tried.

    :param max_tokens: images with more tokens do not count, as no prompt has room for them
    """
    largest: Inputs | None = None
    for ratio in _RATIOS:
        last = num_alike = 0
        for pixels in _sizes(limits.max_pixels):
            height = max(int((pixels / ratio) ** 0.5), 1)
            picture = np.full((height, max(int(height * ratio), 1), 3), 128, dtype=np.uint8)
            try:
                num_tokens, inputs = prompts.measure(Image.parse(picture))
            except InvalidRequestError:  # it is too small, or has a shape that the processor refuses
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

"""Encodes a trial image before the first request, so that no request waits for libraries to load kernels."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from paged_sdk.build.vision import LoadedVision
from paged_sdk.logs import get_logger
from paged_sdk.types.image import Image

__all__ = ["encode_for_trial"]

_log = get_logger(__name__)

_SIZE: Final = (64, 96)


def encode_for_trial(vision: LoadedVision) -> None:
    """Encode a grey image, on the thread that will encode requests' images. A failure is logged: requests report it."""
    picture = Image.parse(np.full((*_SIZE, 3), 128, dtype=np.uint8))
    try:
        _, media = vision.prompts.insert([vision.prompts.placeholder_id], [picture])
        assert media is not None, "a picture was given"
        with torch.inference_mode():
            for span in media.spans:
                vision.encoder.encode(span.inputs, lambda: None)
    except Exception as error:  # encoders may raise anything
        _log.warning("No picture could be encoded for trial: %r", error)

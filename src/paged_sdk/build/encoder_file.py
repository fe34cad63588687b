"""Finds the file of a GGUF model's image encoder (mmproj), and opens it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from paged_sdk.config.build import ModelSource, is_encoder_name
from paged_sdk.errors import ConfigError, ModelLoadError
from paged_sdk.logs import get_logger
from paged_sdk.vision.processor import make_image_processor
from paged_sdk.weights.hub import resolve_beside
from paged_sdk.weights.mmproj.source import Mmproj

__all__ = ["EncoderFile", "find_encoder_file"]

_log = get_logger(__name__)


@frozen
class EncoderFile:
    """Says which file holds a model's image encoder.

    :ivar is_asked: True: the file was named or images were requested, so a file that cannot be used is an error; False:
        the file was found in the model's directory, and is ignored if it cannot be used
    """

    path: Path
    is_asked: bool

    def open(self, config: Mapping[str, Any], model: Path) -> Mmproj | None:
        """Open the file. Unless :attr:`is_asked`, return None and log the reason if it cannot be used.

        :param config: the decoder's config
        :param model: the decoder's file
        :raises ModelLoadError: the file cannot be used
        :raises ConfigError: a package that reads images is not installed
        """
        try:
            encoder = Mmproj(self.path, config, model)
            make_image_processor(*encoder.processor)
        except (ModelLoadError, ConfigError) as error:
            if self.is_asked:
                raise
            self.leave_out(error)
            return None
        return encoder

    def leave_out(self, reason: Exception) -> None:
        """Log why the file is not used."""
        _log.warning("The model takes no images: %s", reason)


def find_encoder_file(
    source: ModelSource, model: Path, *, revision: str | None, token: str | bool | None, wants_images: bool
) -> EncoderFile | None:
    """Find the image encoder that the source names, or the only one in the model's directory.

    :param model: the decoder's file
    :param wants_images: whether images were requested, so that an unusable file is an error
    :raises ModelLoadError: the named file does not exist
    """
    if source.mmproj is not None:
        return EncoderFile(resolve_beside(source.location, source.mmproj, revision=revision, token=token), True)
    if not source.gguf or not os.path.isdir(os.path.expanduser(source.location)):
        return None
    beside = sorted(path for path in model.parent.glob("*.gguf") if is_encoder_name(path.name))
    if len(beside) > 1:
        _log.info(
            "There are several image encoders (%s): with_mmproj() says which to use.", ", ".join(map(str, beside))
        )
    return EncoderFile(beside[0], wants_images) if len(beside) == 1 else None

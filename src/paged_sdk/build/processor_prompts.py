"""Inserts images into prompts for checkpoints whose whole processor is used, and checks the result against it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from attrs import evolve
from torch import Tensor

from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.config.images import ImageLimits
from paged_sdk.errors import CheckpointError, InvalidRequestError, PagedError, UnsupportedArchitectureError, shown
from paged_sdk.logs import get_logger
from paged_sdk.types.image import Image
from paged_sdk.types.media import PromptMedia
from paged_sdk.vision.processor import ImagePrompts
from paged_sdk.vision.whole_processor import WholeProcessor

__all__ = ["SIZES", "ProcessorPrompts"]

_log = get_logger(__name__)

SIZES: Final = ((96, 64), (56, 112))
"""Heights and widths of the trial images: two shapes, since processors cut and pad by shape."""


class ProcessorPrompts:
    """Makes prompts with images, both as transformers' processor and as this engine does.

    :param path: the checkpoint
    :param model: transformers' model; its text decoder is not needed
    :raises UnsupportedArchitectureError: the processor does not define the text that replaces an image's placeholder
    :raises CheckpointError: the checkpoint lacks something that images need
    :raises ConfigError: a package that reads images is not installed
    """

    def __init__(self, path: Path, model_type: str, model: Any, tokenizer: Tokenizer) -> None:
        self._path = path
        self._model_type = model_type
        self._model = model
        self._tokenizer = tokenizer
        self._processor = WholeProcessor(path, model_type)
        if not self._processor.says_text:
            raise self._refusal("its processor does not say which text takes an image's place (replace_image_token)")
        self._family = self._processor.family(model)
        self._prompts = self.make(ImageLimits(), is_bidirectional=False)

    def make(self, limits: ImageLimits, *, is_bidirectional: bool) -> ImagePrompts:
        """Make the object that inserts images into requests' prompts.

        :param is_bidirectional: whether the tokens of an image attend to one another in both directions
        """
        config: dict[str, Any] = self._model.config.to_dict()
        family = evolve(self._family, is_bidirectional=is_bidirectional)
        return ImagePrompts(family, self._path, config, self._tokenizer, limits, self._processor)

    def limited(self, limits: ImageLimits) -> ImageLimits:
        """Return the limits within which this engine makes the same tokens as the processor: as given, or one image per
        request.

        :raises UnsupportedArchitectureError: the tokens differ even with one image
        """
        if self._has_same_tokens(SIZES):
            return limits
        if not self._has_same_tokens(SIZES[:1]):
            raise self._refusal("its processor writes images into prompts in a way of its own")
        _log.info("%s takes one image for a request: its processor prepares several otherwise.", self._path.name)
        return evolve(limits, max_images=1)

    def made(self, sizes: Sequence[tuple[int, int]]) -> tuple[Sequence[int], PromptMedia]:
        """Return the tokens of a prompt with images of these sizes, as made for requests."""
        token_ids = self._tokenizer.encode(self._text(len(sizes)), add_special_tokens=False)
        try:
            made, media = self._prompts.insert(token_ids, [Image.parse(_picture(*size)) for size in sizes])
        except InvalidRequestError as error:
            raise CheckpointError(f"{self._path}: its processor refuses a small image: {error}") from error
        assert media is not None
        return made, media

    def given(self, sizes: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
        """Return the inputs that transformers' processor makes of the same prompt for transformers' model."""
        pictures = [_picture(*size) for size in sizes]
        return self._processor.prompt(self._text(len(sizes)), pictures, self._model)

    def _has_same_tokens(self, sizes: Sequence[tuple[int, int]]) -> bool:
        try:
            token_ids, _ = self.made(sizes)
            given = self.given(sizes)
        except PagedError:
            raise
        except Exception as error:  # a processor from elsewhere may raise anything
            _log.info("A prompt with %d images cannot be prepared: %s", len(sizes), shown(str(error)))
            return False
        tokens: list[int] = given["input_ids"][0].tolist()
        return list(token_ids) == tokens

    def _text(self, num_images: int) -> str:
        # Line breaks around the placeholder: they may merge with line breaks that the processor inserts.
        return "What is this?\n" + f"{self._processor.placeholder}\nAnd that?" * num_images

    def _refusal(self, reason: str) -> UnsupportedArchitectureError:
        return UnsupportedArchitectureError(
            f"model_type {shown(self._model_type)} cannot take images through transformers' classes: {reason}",
            architecture=self._model_type,
        )


def _picture(height: int, width: int) -> npt.NDArray[np.uint8]:
    """Return an image whose parts all differ."""
    rows, columns = np.arange(height)[:, None], np.arange(width)
    channels = (rows * 255 // height + 0 * columns, columns * 255 // width + 0 * rows, rows * columns % 251)
    return np.stack(np.broadcast_arrays(*channels), axis=-1).astype(np.uint8)

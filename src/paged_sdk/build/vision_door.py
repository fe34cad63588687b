"""Loads what a model that runs through transformers' classes needs to take images, and tries it with one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve

from paged_sdk.build.vision import LoadedVision
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.config.images import ImageLimits
from paged_sdk.errors import CheckpointError, InvalidRequestError, PagedError, shown
from paged_sdk.kernels.step import InsertedRows
from paged_sdk.logs import get_logger
from paged_sdk.models.transformers_door.image_check import PromptWithImage, check_images
from paged_sdk.models.transformers_door.model import TransformersModel
from paged_sdk.models.transformers_door.skeleton import refusal
from paged_sdk.types.image import Image
from paged_sdk.types.media import PromptMedia
from paged_sdk.vision.encoder import EncodedImage, ImageEncoder
from paged_sdk.vision.processor import ImagePrompts
from paged_sdk.vision.whole_processor import WholeProcessor

__all__ = ["load_vision_door"]

_log = get_logger(__name__)

_SIZES: Final = ((96, 64), (56, 112))
"""Of the images that are tried: of two shapes, since processors cut and pad by shape."""


def load_vision_door(path: Path, model: TransformersModel, tokenizer: Tokenizer, limits: ImageLimits) -> LoadedVision:
    """Load a checkpoint's processor, and compare what it and the model's class make of images with what is made here.

    :param path: the checkpoint
    :raises UnsupportedArchitectureError: they are not the same
    :raises CheckpointError: the checkpoint lacks something that images need
    :raises ConfigError: a package that reads images is not installed
    """
    model_type, own = model.config.model_type, model.transformers_model
    processor = WholeProcessor(path, model_type)
    if not processor.says_text:
        raise refusal(model_type, "its processor does not say which text takes an image's place (replace_image_token)")
    family = processor.family(own)
    config: dict[str, Any] = own.config.to_dict()
    prompts = ImagePrompts(family, path, config, tokenizer, ImageLimits(), processor)
    if not model.blocks:
        raise refusal(model_type, "its layers cannot be told from its image encoder's")
    text = {module for block in model.blocks for module in block.modules()}
    encoder = ImageEncoder(own, dtype=model.dtype, device=model.device, others=text)
    trial = _Trial(model, processor, prompts, encoder, tokenizer, family.placeholder or "")
    if not trial.has_same_tokens(_SIZES):
        if not trial.has_same_tokens(_SIZES[:1]):
            raise refusal(model_type, "its processor writes images into prompts in a way of its own")
        _log.info("%s takes one image for a request: its processor prepares several otherwise.", path.name)
        limits = evolve(limits, max_images=1)
    is_whole = check_images(model, trial.prompt())
    prompts = ImagePrompts(evolve(family, is_whole=is_whole), path, config, tokenizer, limits, processor)
    return LoadedVision(prompts, encoder, is_whole)


class _Trial:
    """Makes prompts with images, in transformers' way and in this package's."""

    def __init__(
        self,
        model: TransformersModel,
        processor: WholeProcessor,
        prompts: ImagePrompts,
        encoder: ImageEncoder,
        tokenizer: Tokenizer,
        placeholder: str,
    ) -> None:
        self._model = model
        self._processor = processor
        self._prompts = prompts
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._placeholder = placeholder

    def has_same_tokens(self, sizes: Sequence[tuple[int, int]]) -> bool:
        """Say whether a prompt with images of these sizes has the same tokens in both ways."""
        try:
            _, token_ids, _ = self._made(sizes)
            given = self._given(sizes)
        except PagedError:
            raise
        except Exception as error:  # whatever a stranger's processor raises
            _log.info("A prompt with %d images cannot be prepared: %s", len(sizes), shown(str(error)))
            return False
        tokens: list[int] = given["input_ids"][0].tolist()
        return list(token_ids) == tokens

    def prompt(self) -> PromptWithImage:
        """Return a prompt with one image."""
        sizes = _SIZES[:1]
        _, token_ids, media = self._made(sizes)
        (span,) = media.spans
        encoded = self._encode(media)
        if len(encoded.vectors) != len(span.places):
            what = f"its encoder gives {len(encoded.vectors)} vectors for an image of {len(span.places)} tokens"
            raise refusal(self._model.config.model_type, what)
        device = self._model.device
        positions = np.arange(len(token_ids)) if media.positions is None else media.positions
        blocks = torch.full((len(token_ids),), -1, device=device)
        blocks[int(span.places[0]) : int(span.places[-1]) + 1] = 0
        places = torch.from_numpy(span.places).to(device)
        return PromptWithImage(
            given={name: self._moved(value) for name, value in self._given(sizes).items()},
            token_ids=torch.tensor(list(token_ids), device=device),
            positions=torch.from_numpy(positions).to(device),
            inserted=InsertedRows(places, encoded.vectors, encoded.later),
            blocks=blocks,
        )

    def _encode(self, media: PromptMedia) -> EncodedImage:
        try:
            with torch.inference_mode():
                return self._encoder.encode(media.spans[0].inputs, lambda: None)
        except Exception as error:  # a class of another form
            reason = shown(next(iter(str(error).splitlines()), type(error).__name__))
            what = f"its encoder cannot be tried ({reason})"
            raise refusal(self._model.config.model_type, what) from error

    def _made(self, sizes: Sequence[tuple[int, int]]) -> tuple[str, Sequence[int], PromptMedia]:
        text = self._text(len(sizes))
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        try:
            made, media = self._prompts.insert(token_ids, [Image.parse(_picture(*size)) for size in sizes])
        except InvalidRequestError as error:
            raise CheckpointError(f"its processor refuses a small image: {error}") from error
        assert media is not None
        return text, made, media

    def _given(self, sizes: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
        text, pictures = self._text(len(sizes)), [_picture(*size) for size in sizes]
        return self._processor.prompt(text, pictures, self._model.transformers_model)

    def _text(self, num_images: int) -> str:
        return "What is this?\n" + f"{self._placeholder}\nAnd that?" * num_images  # line breaks may join others

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device=self._model.device, dtype=self._model.dtype if value.is_floating_point() else None)


def _picture(height: int, width: int) -> npt.NDArray[np.uint8]:
    """Return an image no two parts of which are the same."""
    rows, columns = np.arange(height)[:, None], np.arange(width)
    channels = (rows * 255 // height + 0 * columns, columns * 255 // width + 0 * rows, rows * columns % 251)
    return np.stack(np.broadcast_arrays(*channels), axis=-1).astype(np.uint8)

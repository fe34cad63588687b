"""Turn images into prompt tokens and encoder inputs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from attrs import frozen

from paged_sdk.config.images import ImageLimits
from paged_sdk.errors import CheckpointError, ConfigError, InvalidRequestError, shown
from paged_sdk.system.files import is_file, read_json_if_there
from paged_sdk.types.image import Image
from paged_sdk.types.media import ImageSpan, PromptMedia
from paged_sdk.vision.family import Inputs, ProcessedImage, VisionFamily
from paged_sdk.vision.image_decoding import decode
from paged_sdk.vision.positions import grid_positions

__all__ = ["ImagePrompts", "ImageTokenizer", "load_image_processor", "make_image_processor"]

_IMAGE_PROCESSOR: Final = "preprocessor_config.json"
_PROCESSOR: Final = "processor_config.json"
_KEPT_BYTES: Final = 1 << 28
"""Size of the cache of processed images, 256 MiB: a conversation sends all of its images with each turn."""


class ImageTokenizer(Protocol):
    """Describes the methods that images need of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text's tokens; special tokens in the text are recognized."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text, or None."""
        ...

    def is_special(self, id: int) -> bool:
        """Return whether a token is special."""
        ...


@frozen(eq=False)
class _Prepared:
    """Holds one processed image.

    :ivar token_ids: the image's tokens in the prompt
    :ivar places: indices of the tokens whose embeddings are replaced by the encoder's vectors
    :ivar inputs: the encoder's inputs
    """

    token_ids: tuple[int, ...]
    places: npt.NDArray[np.int64]
    inputs: Inputs

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.inputs.values())


class ImagePrompts:
    """Inserts images into prompts; callable from any thread.

    :param directory: the checkpoint, which holds preprocessor_config.json
    :param config: content of the checkpoint's config.json
    :param limits: limits on the size and number of images
    :param processor: an image processor, from pixels to encoder inputs; None: the checkpoint's
    :param settings: content of processor_config.json; None: read from the checkpoint
    :raises CheckpointError: the checkpoint has no image processor, or no token id for images
    :raises ConfigError: a package that reads images is not installed
    """

    def __init__(
        self,
        family: VisionFamily,
        directory: Path,
        config: Mapping[str, Any],
        tokenizer: ImageTokenizer,
        limits: ImageLimits,
        processor: Any = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._family = family
        self._config = config
        self._tokenizer = tokenizer
        self._limits = limits
        self._settings = read_json_if_there(directory / _PROCESSOR) if settings is None else settings
        self._processor = _processor_of(family, directory) if processor is None else processor
        self._image_token_id = self._find_image_token(directory)
        self._image_token = tokenizer.decode([self._image_token_id], skip_special_tokens=False)
        self._kept: OrderedDict[bytes, _Prepared] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        # The cache is not sent to other processes.
        return {name: value for name, value in vars(self).items() if name not in ("_kept", "_kept_bytes", "_lock")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _kept=OrderedDict(), _kept_bytes=0, _lock=threading.Lock())

    def insert(self, token_ids: Sequence[int], images: Sequence[Image]) -> tuple[Sequence[int], PromptMedia | None]:
        """Return a prompt's tokens with each image's tokens in place of its placeholder, and the images.

        :param token_ids: the prompt as rendered by the chat template, with one placeholder per image
        :raises InvalidRequestError: there are too many images, an image cannot be used, or the template did not write
            one placeholder per image
        """
        if len(images) > self._limits.max_images:
            allowed = f"at most max_images = {self._limits.max_images}"
            raise InvalidRequestError.of("images", f"{len(images)} images", allowed)
        num_shown = sum(token_id == self.placeholder_id for token_id in token_ids)
        if num_shown != len(images):
            raise InvalidRequestError(
                f"the model's chat template shows it {num_shown} of the {len(images)} images of these messages",
                field="messages",
            )
        if not images:
            return token_ids, None
        prepared = [self._prepare(image) for image in images]
        expanded: list[int] = []
        spans: list[ImageSpan] = []
        if self._family.around:
            token_ids = self._with_text_around(token_ids)
        for token_id in token_ids:
            if token_id != self.placeholder_id:
                expanded.append(token_id)
                continue
            own, image = prepared[len(spans)], images[len(spans)]
            spans.append(
                ImageSpan(
                    first_token=len(expanded),
                    num_tokens=len(own.token_ids),
                    places=own.places + len(expanded),
                    digest=image.digest,
                    inputs=own.inputs,
                    is_bidirectional=self._family.is_bidirectional,
                )
            )
            expanded += own.token_ids
        grids = [own.inputs["image_grid_thw"][0] for own in prepared] if self._family.has_grid else None
        merge = self._merge_size if self._family.has_grid else 1
        positions = None if grids is None else grid_positions(len(expanded), spans, grids, merge)
        return expanded, PromptMedia(spans=tuple(spans), positions=positions)

    def measure(self, image: Image) -> tuple[int, Inputs]:
        """Return an image's number of tokens and encoder inputs, without using the cache.

        :raises InvalidRequestError: the image cannot be used
        """
        prepared = self._process(image)
        return len(prepared.token_ids), prepared.inputs

    def _with_text_around(self, token_ids: Sequence[int]) -> list[int]:
        """Return a prompt with the family's ``around`` before and after each image, tokenized with adjacent text."""
        made: list[int] = []
        text: list[int] = []

        def flush(before: str, after: str) -> None:
            own = self._tokenizer.decode(text, skip_special_tokens=False)
            if self._tokenizer.encode(own, add_special_tokens=False) == text:
                made.extend(self._tokenizer.encode(before + own + after, add_special_tokens=False))
            else:  # decoding does not round-trip, so the prompt's own tokens stay as they are
                made.extend(self._tokenizer.encode(before, add_special_tokens=False))
                made.extend(text)
                made.extend(self._tokenizer.encode(after, add_special_tokens=False))
            text.clear()

        around, before = self._family.around, ""
        for token_id in token_ids:
            if not self._tokenizer.is_special(token_id):
                text.append(token_id)
                continue
            is_image = token_id == self.placeholder_id
            flush(before, around if is_image else "")
            made.append(token_id)
            before = around if is_image else ""
        flush(before, "")
        return made

    @cached_property
    def placeholder_id(self) -> int:
        """Return the id of the token that a chat template writes for an image.

        :raises CheckpointError: the tokenizer lacks this token
        """
        if self._family.placeholder is None:
            return self._image_token_id
        token_id = self._tokenizer.token_id(self._family.placeholder)
        if token_id is None:
            raise CheckpointError(f"the tokenizer has no token {self._family.placeholder!r}, which images need")
        return token_id

    @property
    def _merge_size(self) -> int:
        return int(self._processor.merge_size)

    def _prepare(self, image: Image) -> _Prepared:
        with self._lock:
            found = self._kept.get(image.digest)
            if found is not None:
                self._kept.move_to_end(image.digest)
                return found
        prepared = self._process(image)
        with self._lock:
            if image.digest not in self._kept:
                self._kept[image.digest] = prepared
                self._kept_bytes += prepared.num_bytes
            while self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= self._kept.popitem(last=False)[1].num_bytes
        return prepared

    def _process(self, image: Image) -> _Prepared:
        pixels = decode(image, self._limits)
        height, width = pixels.shape[:2]
        try:
            made = self._processor(images=[pixels], return_tensors="np", **self._family.options(self._config))
        except Exception as error:  # for example an aspect ratio that the processor refuses
            raise InvalidRequestError(
                f"the model's image processor refuses {height} x {width} pixels: {error}", field="image"
            ) from error
        outputs = {name: np.asarray(value) for name, value in made.items()}
        inputs = {name: outputs[name] for name in self._family.encoder_inputs if name in outputs}
        processed = ProcessedImage(
            inputs=outputs, config=self._config, processor=self._settings, image_token=self._image_token
        )
        token_ids = tuple(self._tokenizer.encode(self._family.expand(processed), add_special_tokens=False))
        places = np.flatnonzero(np.array(token_ids) == self._image_token_id)
        if not len(places):
            raise InvalidRequestError.of("image", f"{height} x {width} pixels", "enough pixels for one patch")
        return _Prepared(token_ids, places, inputs)

    def _find_image_token(self, directory: Path) -> int:
        for name in self._family.image_token_fields:
            value = self._config.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
                    raise CheckpointError(f"config.json: {name} = {shown(value)}: expected a token id", path=directory)
                return value
        raise CheckpointError(
            f"config.json has none of {', '.join(self._family.image_token_fields)}: which token stands for images is "
            "not known",
            path=directory,
        )


def _processor_of(family: VisionFamily, directory: Path) -> Any:
    if family.processor is None:
        return load_image_processor(directory)
    _must_have_settings(directory)
    _of_transformers("AutoImageProcessor")  # whoever lacks a package is told so
    settings = read_json_if_there(directory / _PROCESSOR).get("image_processor")
    if not isinstance(settings, dict):  # as in transformers, which writes one of the two
        settings = read_json_if_there(directory / _IMAGE_PROCESSOR)
    try:
        return family.processor(settings)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}", path=directory) from error


def _must_have_settings(directory: Path) -> None:
    if not any(is_file(directory / name) for name in (_IMAGE_PROCESSOR, _PROCESSOR)):
        raise CheckpointError(f"{directory} has no {_IMAGE_PROCESSOR}, which images need", path=directory)


def load_image_processor(directory: Path) -> Any:
    """Load a checkpoint's image processor by transformers, in the variant that needs only Pillow.

    :raises CheckpointError: the checkpoint has none, or it cannot be loaded
    :raises ConfigError: transformers or Pillow is not installed
    """
    _must_have_settings(directory)
    loader = _of_transformers("AutoImageProcessor")
    try:
        return loader.from_pretrained(directory, local_files_only=True, trust_remote_code=False, backend="pil")
    except ImportError as error:
        raise ConfigError(
            f"{directory}: the image processor needs packages that are not installed: {error}",
            setting="vision",
            allowed="the packages that transformers' image processor needs to be installed",
        ) from error
    except Exception as error:  # transformers raises anything for a malformed file
        raise CheckpointError(f"{directory}: the image processor cannot be loaded: {error}", path=directory) from error


def make_image_processor(name: str, settings: Mapping[str, Any]) -> Any:
    """Make an image processor of transformers that needs only Pillow.

    :param name: name of its class
    :raises CheckpointError: the class refuses the settings
    :raises ConfigError: transformers or Pillow is not installed
    """
    make = _of_transformers(name)
    try:
        return make(**settings)
    except Exception as error:  # transformers raises anything for invalid settings
        raise CheckpointError(f"the image processor {name} cannot be made with {shown(settings)}: {error}") from error


def _of_transformers(name: str) -> Any:
    """Return a class of transformers.

    :raises ConfigError: the class or Pillow cannot be imported
    """
    try:
        import PIL.Image  # noqa: F401  # for this error rather than transformers'
        import transformers

        return getattr(transformers, name)
    except ImportError as error:
        raise ConfigError(
            f"images need packages that are not installed ({error}): pip install 'paged-sdk[vision]'",
            setting="vision",
            allowed="transformers and pillow to be installed",
        ) from error

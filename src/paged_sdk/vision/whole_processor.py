"""Process images by transformers' processor of a checkpoint, for models without a family in ``families/``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paged_sdk.errors import CheckpointError, shown
from paged_sdk.system.files import read_json_if_there
from paged_sdk.vision.family import ProcessedImage, VisionFamily
from paged_sdk.vision.processor import load_image_processor

__all__ = ["WholeProcessor"]

_SETTINGS: Final = "processor_config.json"
_KINDS: Final = "mm_token_type_ids"
"""An input of some classes that says for each token whether it belongs to an image."""


class WholeProcessor:
    """Makes encoder inputs and an image's prompt text, by transformers' processor.

    :param directory: the checkpoint, which holds preprocessor_config.json or processor_config.json
    :param model_type: selects the class if the checkpoint names none
    :raises CheckpointError: the checkpoint has no processor, or its processor cannot be used
    :raises ConfigError: a package that reads images is not installed
    """

    def __init__(self, directory: Path, model_type: str) -> None:
        image_processor = load_image_processor(directory)
        self._directory = directory
        try:
            self._whole = _make(directory, model_type, image_processor)
            merged = self._whole._merge_kwargs(tokenizer_init_kwargs=self._whole.tokenizer.init_kwargs)
        except CheckpointError:
            raise
        except Exception as error:  # transformers raises anything for malformed files
            there = "" if (directory / _SETTINGS).is_file() else f" (there is no {_SETTINGS})"
            raise CheckpointError(
                f"{directory}: its processor cannot be made of its files{there}: {error}", path=directory
            ) from error
        self._options: dict[str, Any] = {
            name: value for name, value in merged["images_kwargs"].items() if name != "return_tensors"
        }
        self._around = self._text_around()

    def __call__(self, *, images: Sequence[npt.NDArray[np.uint8]], return_tensors: str) -> Mapping[str, Any]:
        """Return the image processor's outputs for one image, with the options of transformers' processor."""
        made, _ = self._whole._process_images(list(images), **self._options, return_tensors=return_tensors)
        values: Mapping[str, Any] = made
        return values

    @property
    def merge_size(self) -> int:
        """Return the number of patches per token in height, and in width."""
        return int(self._whole.image_processor.merge_size)

    @property
    def says_text(self) -> bool:
        """Return whether the processor implements ``replace_image_token``, which returns an image's prompt text."""
        from transformers import ProcessorMixin

        return type(self._whole).replace_image_token is not ProcessorMixin.replace_image_token

    @property
    def placeholder(self) -> str:
        """Return the text that a chat template writes for an image.

        :raises CheckpointError: the processor defines none
        """
        # Some processors have one token for an image's place, and another for each of its vectors.
        found = getattr(self._whole, "image_placeholder_token", None) or getattr(self._whole, "image_token", None)
        if not isinstance(found, str) or not found:
            name = type(self._whole).__name__
            raise CheckpointError(
                f"{self._directory}: {name} does not say which token stands for an image", path=self._directory
            )
        return found

    def family(self, model: Any) -> VisionFamily:
        """Return the description of how a model takes images.

        :param model: transformers' model
        """
        return VisionFamily(
            expand=self._expand,
            placeholder=self.placeholder,
            around=self._around,
            encoder_inputs=_inputs_of(model),
            has_grid=hasattr(getattr(model, "model", model), "get_rope_index"),
        )

    def prompt(self, text: str, images: Sequence[npt.NDArray[np.uint8]], model: Any = None) -> dict[str, Tensor]:
        """Return a model's inputs for a prompt with images, as tensors by name.

        :param model: transformers' model, which may need an additional input; None: the processor's outputs
        """
        import PIL.Image

        # Some processors take PIL images, but no arrays.
        opened = [PIL.Image.fromarray(image) for image in images]
        made = self._whole(images=opened, text=[text], return_tensors="np", add_special_tokens=False)
        found = {name: torch.from_numpy(np.asarray(value)) for name, value in made.items()}
        if model is not None and _KINDS not in found and _KINDS in inspect.signature(model.forward).parameters:
            found[_KINDS] = torch.tensor(self._whole.create_mm_token_type_ids(found["input_ids"].tolist()))
        return found

    def _expand(self, image: ProcessedImage) -> str:
        return self._replacement(image.inputs).removeprefix(self._around).removesuffix(self._around)

    def _replacement(self, made: Mapping[str, Any]) -> str:
        return str(self._whole.replace_image_token(made, image_idx=0, **self._options))

    def _text_around(self) -> str:
        """Return the white space that the processor writes before and after an image, for ``VisionFamily.around``."""
        try:
            text = self._replacement(self(images=[np.zeros((64, 64, 3), np.uint8)], return_tensors="np"))
        except Exception:  # reported later, by the trial with an image
            return ""
        before, after = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        return before if before == after else ""


def _make(directory: Path, model_type: str, image_processor: Any) -> Any:
    """Make the processor without its video and audio parts, which need further packages."""
    import transformers
    from transformers import PreTrainedTokenizerFast, ProcessorMixin

    known: Any = import_module("transformers.models.auto.processing_auto")  # has no annotations
    settings = dict(read_json_if_there(directory / _SETTINGS))
    others = read_json_if_there(directory / "preprocessor_config.json")
    name = (
        settings.get("processor_class")
        or others.get("processor_class")
        or known.PROCESSOR_MAPPING_NAMES.get(model_type)
    )
    found: object = getattr(transformers, str(name), None)
    if not inspect.isclass(found) or not issubclass(found, ProcessorMixin):
        raise CheckpointError(f"{directory}: transformers has no processor {shown(name)}", path=directory)
    own: Any = found

    def check(self: Any, argument_name: str, argument: object) -> Any:
        return None if argument is None else own.check_argument_for_proper_class(self, argument_name, argument)

    partial: Any = type(own.__name__, (own,), {"check_argument_for_proper_class": check})
    loader: Any = PreTrainedTokenizerFast  # follows tokenizer.json, like the tokenizer of prompts
    parts = {
        "image_processor": image_processor,
        "tokenizer": loader.from_pretrained(directory, local_files_only=True, trust_remote_code=False),
    }
    return partial.from_args_and_dict([parts.get(each) for each in own.get_attributes()], settings)


def _inputs_of(model: Any) -> tuple[str, ...]:
    """Return the names of the encoder's inputs."""
    calls = [
        getattr(each, "get_image_features", None) for each in (model, getattr(model, "model", None)) if each is not None
    ]
    found = {name: None for call in calls if call is not None for name in inspect.signature(call).parameters}
    return tuple(name for name in found if name not in ("self", "kwargs", "return_dict"))

"""Use a checkpoint's whole processor as transformers has it, for models that have no family here."""

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
"""What some classes are told of each token: whether it is an image's."""


class WholeProcessor:
    """Makes what an encoder takes of pixels, and the text that stands for an image in a prompt.

    :param directory: the checkpoint, which holds preprocessor_config.json or processor_config.json
    :param model_type: tells which processor transformers has for the model
    :raises CheckpointError: the checkpoint has no processor, or one that cannot be used
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
        except Exception as error:  # files of a stranger's
            there = "" if (directory / _SETTINGS).is_file() else f" (there is no {_SETTINGS})"
            raise CheckpointError(
                f"{directory}: its processor cannot be made of its files{there}: {error}", path=directory
            ) from error
        self._options: dict[str, Any] = {
            name: value for name, value in merged["images_kwargs"].items() if name != "return_tensors"
        }
        self._around = self._text_around()

    def __call__(self, *, images: Sequence[npt.NDArray[np.uint8]], return_tensors: str) -> Mapping[str, Any]:
        """Return what the image processor makes of one image, as transformers' own class would have it done."""
        made, _ = self._whole._process_images(list(images), **self._options, return_tensors=return_tensors)
        values: Mapping[str, Any] = made
        return values

    @property
    def merge_size(self) -> int:
        """Return how many patches in height, and in width, have one token."""
        return int(self._whole.image_processor.merge_size)

    @property
    def says_text(self) -> bool:
        """Say whether the processor has transformers' call for the text that takes an image's place."""
        from transformers import ProcessorMixin

        return type(self._whole).replace_image_token is not ProcessorMixin.replace_image_token

    @property
    def placeholder(self) -> str:
        """Return the text that a chat template writes for an image.

        :raises CheckpointError: the processor does not say
        """
        # Some have a token for the place of an image, and another for each of its vectors.
        found = getattr(self._whole, "image_placeholder_token", None) or getattr(self._whole, "image_token", None)
        if not isinstance(found, str) or not found:
            name = type(self._whole).__name__
            raise CheckpointError(
                f"{self._directory}: {name} does not say which token stands for an image", path=self._directory
            )
        return found

    def family(self, model: Any) -> VisionFamily:
        """Describe how the model takes images.

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
        """Return what a model takes of a prompt with images, as tensors by name.

        :param model: transformers' model; None: what the processor gives by itself
        """
        import PIL.Image

        # Some processors take images as their users have them, and no arrays.
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
        """Return the space that the processor writes before and after an image: a tokenizer joins it to the text."""
        try:
            text = self._replacement(self(images=[np.zeros((64, 64, 3), np.uint8)], return_tensors="np"))
        except Exception:  # which is said when the model is tried with an image
            return ""
        before, after = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        return before if before == after else ""


def _make(directory: Path, model_type: str, image_processor: Any) -> Any:
    """Make the processor without what is for videos and sounds, which need packages of their own."""
    import transformers
    from transformers import PreTrainedTokenizerFast, ProcessorMixin

    known: Any = import_module("transformers.models.auto.processing_auto")  # it has no annotations
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
    loader: Any = PreTrainedTokenizerFast  # which does what tokenizer.json says, as the tokenizer of prompts does
    parts = {
        "image_processor": image_processor,
        "tokenizer": loader.from_pretrained(directory, local_files_only=True, trust_remote_code=False),
    }
    return partial.from_args_and_dict([parts.get(each) for each in own.get_attributes()], settings)


def _inputs_of(model: Any) -> tuple[str, ...]:
    """Return the names of what the model's encoder takes."""
    calls = [
        getattr(each, "get_image_features", None) for each in (model, getattr(model, "model", None)) if each is not None
    ]
    found = {name: None for call in calls if call is not None for name in inspect.signature(call).parameters}
    return tuple(name for name in found if name not in ("self", "kwargs", "return_dict"))

"""Show an image encoder's GGUF file (mmproj) as the part of a Hugging Face checkpoint that it was."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError, shown
from paged_sdk.weights.mmproj.file import MmprojFile
from paged_sdk.weights.mmproj.projectors import PROJECTORS, Projector

__all__ = ["Mmproj"]

_NORM_WITH_ONE = "mm.soft_emb_norm.weight"
"""Converters add 1 to it, as they do to Gemma's norms."""


class Mmproj:
    """Holds an image encoder that is in a file of its own, open.

    :ivar path: the file
    :ivar config: what config.json would be; of the decoder it says what transformers' modules ask
    :ivar tokens: the texts that the token may have whose embeddings are replaced
    :ivar after: what follows an image in a prompt, beside what the decoder's chat template says
    :ivar processor: transformers' class that prepares images, and its settings
    :param path: the file
    :param text: the decoder's config, as :func:`~paged_sdk.weights.gguf.config.config_from_gguf` makes it
    :param text_path: the decoder's file, for messages
    :raises CheckpointError: the file cannot be read, holds something else, or was made for another decoder
    :raises UnsupportedArchitectureError: there is no such encoder here
    """

    def __init__(self, path: Path, text: Mapping[str, Any], text_path: Path) -> None:
        self.path = path
        self._file = MmprojFile(path)
        try:
            self._kind = _kind(self._file)
            self.config: dict[str, Any] = {**self._kind.config(self._file), "text_config": self._text(text)}
            self.tokens: tuple[str, ...] = self._kind.tokens
            self.after: str = self._kind.after
            self.processor: tuple[str, dict[str, Any]] = self._kind.processor(self._file)
            self._must_fit(text, text_path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; tensors that were read stay valid."""
        self._file.close()

    @property
    def num_elements(self) -> int:
        """Return how many numbers its tensors have."""
        return sum(math.prod(tensor.shape) for tensor in self._file.tensors.values())

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all tensors, decoded, by the names of transformers' model.

        :raises UnsupportedArchitectureError: there is one that it has no place for
        """
        read = {
            name: tensor.decoded(torch.float32 if name == _NORM_WITH_ONE else dtype)
            for name, tensor in self._file.tensors.items()
        }
        if _NORM_WITH_ONE in read:
            read[_NORM_WITH_ONE] = (read[_NORM_WITH_ONE] - 1).to(dtype)
        return {name: tensor.to(dtype) for name, tensor in self._converted(read)}

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        unread = {name: torch.empty(tensor.shape, device="meta") for name, tensor in self._file.tensors.items()}
        return [name for name, _ in self._converted(unread)]

    def _converted(self, read: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Give tensors the names and shapes that transformers' model has; each is held no longer than it is here."""
        try:
            self._kind.edit(read, self._file)
        except RuntimeError as error:  # of torch's, for a tensor of another shape
            raise self._file.malformed(str(error)) from error
        while read:
            name, tensor = read.popitem()
            own = self._kind.names.of(name)
            if own is None:
                raise self._file.unsupported(f"tensor {shown(name)}")
            yield own, tensor

    def _text(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Return what modules that are not the decoder ask of it."""
        names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
        return {"model_type": self._kind.text_type, **{name: text[name] for name in names if name in text}}

    def _must_fit(self, text: Mapping[str, Any], text_path: Path) -> None:
        decoders, own = self._kind.decoders, text.get("model_type")
        if decoders is not None and own not in decoders:
            raise CheckpointError(
                f"{self.path} is an image encoder (projector {shown(self._file.projector)}) for "
                f"{', '.join(sorted(decoders))}, and {text_path} is {shown(own)}",
                path=self.path,
            )
        layers = len(self.config["vision_config"].get("deepstack_visual_indexes", ()))
        if layers != text.get("num_image_layers", 0):
            raise CheckpointError(
                f"{self.path} is the image encoder of another model: it has vectors for {layers} layers more, and "
                f"{text_path} {text.get('num_image_layers', 0)} such layers",
                path=self.path,
            )
        name, dim = self._kind.output
        size = self._file.matrix_shape(name)[dim]
        if size != text["hidden_size"]:
            raise CheckpointError(
                f"{self.path} is the image encoder of another model: its vectors have {size} numbers, and those of "
                f"{text_path}'s tokens {text['hidden_size']}",
                path=self.path,
            )


def _kind(file: MmprojFile) -> Projector:
    kind = PROJECTORS.get(file.projector)
    if kind is None:
        raise UnsupportedArchitectureError(
            f"{file.path} is an image encoder with projector {shown(file.projector)}: supported are "
            f"{', '.join(PROJECTORS)}",
            path=file.path,
            architecture=file.projector,
            supported=PROJECTORS,
        )
    return kind

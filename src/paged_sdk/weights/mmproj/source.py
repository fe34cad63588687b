"""Present an image encoder's GGUF file (mmproj) as the corresponding part of a Hugging Face checkpoint."""

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
"""A norm to which converters add 1, as to all of Gemma's norms."""


class Mmproj:
    """Holds an open image encoder that is stored in a file of its own.

    :ivar path: the file
    :ivar config: the content of config.json; its decoder section only has what transformers' vision modules need
    :ivar tokens: possible texts of the image token, whose embeddings are replaced
    :ivar after: the text after an image in a prompt, if the decoder's chat template does not know of images
    :ivar processor: the name of transformers' image processor class, and its settings
    :param path: the file
    :param text: the decoder's config, as made by :func:`~paged_sdk.weights.gguf.config.config_from_gguf`
    :param text_path: the decoder's file, for messages
    :raises CheckpointError: the file cannot be read, is not an image encoder, or belongs to another decoder
    :raises UnsupportedArchitectureError: this kind of encoder is not supported
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
        """Return the total number of elements of the tensors."""
        return sum(math.prod(tensor.shape) for tensor in self._file.tensors.values())

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all tensors, decoded, by their names in transformers' model.

        :raises UnsupportedArchitectureError: transformers' model has no name for a tensor
        """
        read = {
            name: tensor.decoded(torch.float32 if name == _NORM_WITH_ONE else dtype)
            for name, tensor in self._file.tensors.items()
        }
        if _NORM_WITH_ONE in read:
            read[_NORM_WITH_ONE] = (read[_NORM_WITH_ONE] - 1).to(dtype)
        return {name: tensor.to(dtype) for name, tensor in self._converted(read)}

    def names(self) -> Collection[str]:
        """Return the names of all tensors in transformers' model."""
        unread = {name: torch.empty(tensor.shape, device="meta") for name, tensor in self._file.tensors.items()}
        return [name for name, _ in self._converted(unread)]

    def _converted(self, read: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors with transformers' names and shapes. Empties ``read``, so that each can be freed early."""
        try:
            self._kind.edit(read, self._file)
        except RuntimeError as error:  # from torch: a tensor has another shape
            raise self._file.malformed(str(error)) from error
        while read:
            name, tensor = read.popitem()
            own = self._kind.names.of(name)
            if own is None:
                raise self._file.unsupported(f"tensor {shown(name)}")
            yield own, tensor

    def _text(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Return the decoder's section of the config, with what the vision modules need of it."""
        names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
        return {"model_type": self._kind.text_type, **{name: text[name] for name in names if name in text}}

    def _must_fit(self, text: Mapping[str, Any], text_path: Path) -> None:
        decoders, own = self._kind.decoders, text.get("model_type")
        has_mrope = "mrope_section" in (text.get("rope_scaling") or {})
        if has_mrope if decoders is None else own not in decoders:
            made_for = "decoders without M-RoPE" if decoders is None else ", ".join(sorted(decoders))
            raise CheckpointError(
                f"{self.path} is an image encoder (projector {shown(self._file.projector)}) for {made_for}, and "
                f"{text_path} is {shown(own)}",
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

"""Read an image encoder's GGUF file, as llama.cpp's tools write it (mmproj), with checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError, shown
from paged_sdk.weights.gguf.file import open_gguf, tensors_of_parts
from paged_sdk.weights.gguf.tensor import GgufTensor

__all__ = ["MmprojFile"]

_KIND = "clip.projector_type"
_VISION = "clip.vision."


class MmprojFile:
    """Reads the metadata of an image encoder's file; keys are relative to ``clip.vision.``.

    :ivar path: the file
    :ivar tensors: the tensors by GGUF name
    :param path: the file
    :raises CheckpointError: the file cannot be read, or is not an image encoder
    :raises UnsupportedArchitectureError: the file only encodes audio
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = open_gguf(path)
        self._metadata: dict[str, Any] = self._files[0].metadata
        try:
            self.tensors: Mapping[str, GgufTensor] = tensors_of_parts(self._files)
            self._must_encode_images()
        except BaseException:
            self.close()
            raise

    @property
    def projector(self) -> str:
        """Return llama.cpp's name of the projector (the layers that map to the decoder's size), one per family."""
        name = self._metadata.get(_VISION + "projector_type", self._metadata.get(_KIND))
        if not isinstance(name, str):
            raise self.malformed(f"metadata {_KIND} is {shown(name)}: expected a name")
        return name

    def close(self) -> None:
        """Close the file; tensors that were read stay valid."""
        for file in self._files:
            file.close()

    def has(self, key: str) -> bool:
        """Return whether the file has a key."""
        return _VISION + key in self._metadata

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number >= 0."""
        value = self._metadata.get(_VISION + key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self.malformed(f"metadata {_VISION}{key} is {shown(value)}: expected a number")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an int >= 1."""
        value = self.number(key, default)
        if not isinstance(value, int) or value < 1:
            raise self.malformed(f"metadata {_VISION}{key} is {shown(value)}: expected an int >= 1")
        return value

    def numbers(self, key: str) -> list[float]:
        """Return a list of finite numbers."""
        values = self._metadata.get(_VISION + key)
        if not isinstance(values, list) or not all(
            type(each) in (int, float) and math.isfinite(each) for each in values
        ):
            raise self.malformed(f"metadata {_VISION}{key} is {shown(values)}: expected numbers")
        return values

    def colors(self, key: str) -> list[float]:
        """Return three numbers, one per color channel."""
        values = self.numbers(key)
        if len(values) != 3:
            raise self.malformed(f"metadata {_VISION}{key} is {shown(values)}: expected three numbers")
        return values

    def activation(self, otherwise: str, *, gelu: str) -> str:
        """Return transformers' name of the MLPs' activation function.

        :param otherwise: llama.cpp's default, if the file names none
        :param gelu: the variant that the family means by "gelu"
        """
        use_gelu, use_silu = (self._metadata.get(f"clip.use_{name}", False) is True for name in ("gelu", "silu"))
        if use_gelu and use_silu:
            raise self.malformed("metadata clip.use_gelu and clip.use_silu are both true")
        return gelu if use_gelu else "silu" if use_silu else otherwise

    @property
    def num_layers(self) -> int:
        """Return the encoder's number of layers, after checking that the last one exists."""
        count = self.integer("block_count")
        self.shape(f"v.blk.{count - 1}.attn_out.weight")
        return count

    @property
    def width(self) -> int:
        """Return the encoder's hidden size."""
        width = self.integer("embedding_length")
        if (shape := self.shape("v.blk.0.ln1.weight")) != (width,):
            raise self.malformed(f"metadata {_VISION}embedding_length is {width}, and a norm has shape {list(shape)}")
        return width

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, in torch's order."""
        found = self.tensors.get(name)
        if found is None:
            raise self.malformed(f"there is no tensor {shown(name)}")
        return found.shape

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """Return the shape of a matrix."""
        shape = self.shape(name)
        if len(shape) != 2:
            raise self.malformed(f"tensor {shown(name)} of shape {list(shape)} is no matrix")
        return shape[0], shape[1]

    def malformed(self, what: str) -> CheckpointError:
        """Return an error that names the file."""
        return CheckpointError(f"{self.path} cannot be used as an image encoder: {what}", path=self.path)

    def unsupported(self, what: str) -> UnsupportedArchitectureError:
        """Return an error that names the file and its projector."""
        return UnsupportedArchitectureError(
            f"{self.path} is an image encoder (projector {shown(self.projector)}) with {what}, which is not supported",
            path=self.path,
            architecture=self.projector,
        )

    def _must_encode_images(self) -> None:
        architecture = self._metadata.get("general.architecture")
        if architecture != "clip":
            kind = self._metadata.get("general.type", "model")
            what = f"a {shown(architecture)} {'model' if kind in ('model', 'mmproj') else shown(kind)}"
            raise CheckpointError(
                f"{self.path} holds {what}, not the image encoder of one (mmproj): give it as the model, and the "
                "encoder's file beside it",
                path=self.path,
            )
        if self._metadata.get("clip.has_vision_encoder", True) is not True:
            name = self._metadata.get("clip.audio.projector_type", self._metadata.get(_KIND))
            raise UnsupportedArchitectureError(
                f"{self.path} encodes sounds (projector {shown(name)}), which is not supported: there is no image "
                "encoder in it",
                path=self.path,
                architecture=str(name)[:100],
            )

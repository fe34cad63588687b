"""Plan the GGUF file of a checkpoint's image encoder, write it, and compare it with the checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from paged_sdk.build.export.gguf_encoding import TensorEncoder, tensor_encoder
from paged_sdk.build.progress import LoadingBar
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.errors import CheckpointError, ConfigError, UnsupportedArchitectureError, shown
from paged_sdk.kernels.quantized.gguf_blocks import block_format, tensor_type_of
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix
from paged_sdk.models.checkpoint_layout import names_in, stored_table
from paged_sdk.models.family import find_family, read_config
from paged_sdk.vision.encoder import config_of_model
from paged_sdk.vision.family import find_vision_family
from paged_sdk.vision.processor import load_image_processor, make_image_processor
from paged_sdk.weights.checkpoint import Checkpoint, open_checkpoint
from paged_sdk.weights.gguf.config_export import gguf_architecture
from paged_sdk.weights.gguf.export_matrix import GgufMatrix
from paged_sdk.weights.gguf.mixtures import file_type
from paged_sdk.weights.gguf.names import ARCHITECTURES
from paged_sdk.weights.gguf.writer import GgufValue, PlannedTensor, write_gguf_file
from paged_sdk.weights.hub import resolve_model
from paged_sdk.weights.mmproj.export import IMAGE_BREAK, ExportedEncoder, export_of, feature_layers
from paged_sdk.weights.mmproj.source import Mmproj
from paged_sdk.weights.new_target import must_be_new, new_file
from paged_sdk.weights.source import WeightSource, malformed

__all__ = ["write"]

_TYPES: Final = ("F32", "F16", "BF16", "Q8_0")
_CPU: Final = torch.device("cpu")
# Config fields that do not affect image vectors: training settings and names.
_UNREAD: Final = frozenset(
    {
        *("model_type", "dtype", "torch_dtype", "transformers_version", "architectures", "initializer_range"),
        *("initializer_factor", "attention_dropout", "hidden_dropout_prob", "projection_dropout", "projection_dim"),
        *("layer_scale_init_value", "tokens_per_second", "use_mask_token", "use_mean_pooling", "_attn_implementation"),
        *("_attn_implementation_autoset", "_name_or_path", "vision_use_head", "num_hidden_layers"),
    }
)
_READ_OF_WHOLE: Final = (
    *("vision_feature_select_strategy", "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
    *("mm_tokens_per_image", "scale_factor", "downsample_ratio", "image_grid_pinpoints"),
)
_READ_OF_IMAGES: Final = (
    *("size", "crop_size", "patch_size", "merge_size", "temporal_patch_size", "max_image_size", "image_grid_pinpoints"),
    *("image_mean", "image_std", "resample", "rescale_factor", "min_patches", "max_patches"),
    *("do_resize", "do_center_crop", "do_normalize", "do_rescale", "do_pad", "do_image_splitting"),
)


def write(source: str | Path, target: str | Path, type: str, *, show_progress: bool) -> Path:
    """Implement :func:`paged_sdk.build.export.image_encoder.write_mmproj`."""
    target = Path(os.path.expanduser(target))
    must_be_new(target)
    if type not in _TYPES:
        raise ConfigError.of("type", type, f"one of {', '.join(_TYPES)}")
    path = resolve_model(source, gguf=False)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory with config.json and safetensors", path=path)
    checkpoint = open_checkpoint(path)
    try:
        shape, config = read_config(checkpoint.config), config_of_model(path, checkpoint.config)
        find_vision_family(checkpoint.config)
        kind, processor = export_of(config), load_image_processor(path)
        with tensor_encoder() as encoder:
            tensors = _tensors(checkpoint, kind, config, shape, encoder, type)
            metadata = _metadata(kind, config, shape, processor.to_dict(), path.resolve().name, type)
            with (
                new_file(target, sum(tensor.num_bytes for tensor in tensors)) as part,
                LoadingBar(f"Writing {target.name}", visible=show_progress) as bar,
            ):
                write_gguf_file(
                    part, {key: GgufValue.of(value) for key, value in metadata.items()}, tensors, on_progress=bar.update
                )
                _check_written_file(part, config, shape, processor, path)
    finally:
        checkpoint.source.close()
    return target


def _metadata(
    kind: ExportedEncoder, config: Any, shape: DecoderConfig, processor: Mapping[str, Any], name: str, type: str
) -> dict[str, Any]:
    vision = config.vision_config
    values: dict[str, Any] = {
        "projection_dim": shape.hidden_size,
        "image_size": _side(getattr(vision, "image_size", 0)),
        "patch_size": _side(vision.patch_size),
        "embedding_length": vision.hidden_size,
        "feed_forward_length": getattr(vision, "intermediate_size", 0),
        "block_count": vision.num_hidden_layers if hasattr(vision, "num_hidden_layers") else vision.depth,
        "attention.head_count": getattr(vision, "num_attention_heads", None) or vision.num_heads,
        "attention.layer_norm_epsilon": float(getattr(vision, "layer_norm_eps", 1e-6)),
        "image_mean": [float(each) for each in processor["image_mean"]],
        "image_std": [float(each) for each in processor["image_std"]],
        **kind.metadata(config, processor),
    }
    return {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.name": name,
        "general.file_type": file_type(type),
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind.projector,
        **{key if key.startswith("clip.") else f"clip.vision.{key}": value for key, value in values.items()},
    }


def _side(value: Any) -> int:
    return int(value if isinstance(value, int) else value[0])


def _tensors(
    checkpoint: Checkpoint, kind: ExportedEncoder, config: Any, shape: DecoderConfig, encoder: TensorEncoder, type: str
) -> list[PlannedTensor]:
    """Plan the tensors; each is read once, when it is written.

    :raises UnsupportedArchitectureError: GGUF has no name for a tensor
    """
    source, family = checkpoint.source, find_family(checkpoint.config)
    names = names_in(source, family)
    planned: list[PlannedTensor] = []
    pieces = _Pieces(source, kind, config)
    for name in source.names():
        if not names.is_encoders(name) or name.endswith(".position_ids"):
            continue
        stored = kind.gguf_name(name)
        if stored is None:
            raise UnsupportedArchitectureError(
                f"{checkpoint.path}: GGUF has no name for tensor {shown(name)}", architecture=str(config.model_type)
            )

        for own, size in pieces.shapes(name, stored).items():
            planned.append(_planned(own, size, encoder, type, partial(pieces.read, name, stored, own)))
    if kind.breaks_rows:
        row = _break_row(checkpoint, stored_table(source, shape, names))
        planned.append(_planned(IMAGE_BREAK, tuple(row.shape), encoder, type, lambda: row))
    return planned


class _Pieces:
    """Splits a checkpoint's tensors into GGUF's, which are written one after the other: the last tensor read is kept,
    so that each tensor is read once.
    """

    def __init__(self, source: WeightSource, kind: ExportedEncoder, config: Any) -> None:
        self._source = source
        self._kind = kind
        self._config = config
        self._name = ""
        self._pieces: dict[str, Tensor] = {}

    def shapes(self, name: str, stored: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the pieces of a tensor by name, without reading it.

        :param stored: GGUF's name of the tensor
        :raises CheckpointError: the tensor has a shape that its pieces cannot have
        """
        whole = torch.empty(self._source.shape(name), device="meta")
        try:
            return {own: tuple(piece.shape) for own, piece in self._kind.pieces(stored, whole, self._config)}
        except CheckpointError as error:
            raise malformed(self._source, name, f"tensor {shown(name)}: {error}") from error

    def read(self, name: str, stored: str, own: str) -> Tensor:
        """Return one piece of a tensor.

        :param name: the checkpoint's name of the tensor
        :param stored: GGUF's name of the tensor
        :param own: GGUF's name of the piece
        """
        if self._name != name:
            self._pieces = {}  # freed before the next tensor is read: one is in memory at a time
            values = self._source.tensor(name, torch.float32, _CPU)
            self._name, self._pieces = name, dict(self._kind.pieces(stored, values, self._config))
        return self._pieces[own]


def _planned(name: str, shape: tuple[int, ...], encoder: TensorEncoder, type: str, read: Any) -> PlannedTensor:
    number = tensor_type_of(_type_of(name, shape, type))

    def parts() -> Iterator[Any]:
        values = read()
        rows = values.reshape(-1, shape[-1] if len(shape) > 1 else 1)
        whole = GgufMatrix(shape=tuple(rows.shape) if len(shape) > 1 else shape, matrices=[DenseMatrix(rows)])
        yield from encoder.encoded(name, number, whole)

    return PlannedTensor(name=name, shape=shape, type=number, parts=parts)


def _type_of(name: str, shape: tuple[int, ...], type: str) -> str:
    """Return the type of a tensor. llama.cpp needs F32 for tensors that it adds, and F32 or F16 for patch embeddings.
    It multiplies by mm.input_projection.weight transposed, which blocks along rows do not allow: F16.
    """
    if type == "F32" or len(shape) < 2 or "position_embd" in name:
        return "F32"
    if len(shape) > 2 or name == "mm.input_projection.weight":
        return "F16"
    return type if shape[-1] % block_format(tensor_type_of(type)).elements == 0 else "F16"


def _break_row(checkpoint: Checkpoint, table: str) -> Tensor:
    """Return the embedding of [IMG_BREAK], the token after each row of patches."""
    token = Tokenizer.from_file(checkpoint.path / "tokenizer.json").token_id("[IMG_BREAK]")
    if token is None:
        raise CheckpointError(f"{checkpoint.path}: the tokenizer has no token [IMG_BREAK]", path=checkpoint.path)
    return checkpoint.source.matrix(table).rows(slice(token, token + 1)).decoded(torch.float32)[0]


def _check_written_file(part: Path, config: Any, shape: DecoderConfig, processor: Any, path: Path) -> None:
    """Read the config and image processor settings of a written file, and compare them with the checkpoint's.

    :raises UnsupportedArchitectureError: they differ, since GGUF cannot express a setting
    """
    text = {
        "model_type": ARCHITECTURES[gguf_architecture(shape)].model_type,
        "hidden_size": shape.hidden_size,
        "num_image_layers": shape.num_image_layers,
    }
    encoder = Mmproj(part, text, path)
    try:
        encoder.names()
        read, images = config_of_model(part, encoder.config), make_image_processor(*encoder.processor)
    finally:
        encoder.close()
    pairs = [
        *_pairs(config.vision_config.to_dict(), read.vision_config.to_dict(), "vision_config."),
        *_pairs({name: getattr(config, name, None) for name in _READ_OF_WHOLE}, read.to_dict(), ""),
        *_pairs({name: processor.to_dict().get(name) for name in _READ_OF_IMAGES}, images.to_dict(), "images: "),
    ]
    if hasattr(config, "vision_feature_layer"):
        pairs.append(("vision_feature_layer", feature_layers(config), feature_layers(read)))
    else:
        own, other = (getattr(each.vision_config, "num_hidden_layers", None) for each in (config, read))
        pairs.append(("num_hidden_layers", own, other))
    for name, own, other in pairs:
        if not _alike(own, other):
            raise UnsupportedArchitectureError(
                f"the image encoder of {path} cannot be written: its {name} {shown(own)} would be read as "
                f"{shown(other)} from a GGUF file",
                path=path,
                architecture=str(config.model_type),
            )


def _pairs(own: Mapping[str, Any], other: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any, Any]]:
    for name, value in own.items():
        if name not in _UNREAD and name in other and value is not None:
            yield f"{place}{name}", value, other[name]


def _alike(own: Any, other: Any) -> bool:
    if isinstance(own, Mapping) and isinstance(other, Mapping):
        return all(_alike(value, other.get(name)) for name, value in own.items() if value is not None)
    if isinstance(own, list | tuple) and isinstance(other, list | tuple):
        return len(own) == len(other) and all(map(_alike, own, other))
    if isinstance(own, float) and isinstance(other, float | int):
        return math.isclose(own, other, rel_tol=1e-5)
    if isinstance(own, list | tuple) != isinstance(other, list | tuple):  # one number for height and width, or a pair
        return _alike([own, own], other) if isinstance(other, list | tuple) else _alike(own, [other, other])
    return bool(own == other)

"""Convert a checkpoint's image encoder to llama.cpp's mmproj format: names, values and metadata.

:mod:`paged_sdk.weights.mmproj.projectors` is the inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from attrs import frozen
from torch import Tensor

from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError, shown
from paged_sdk.weights.mmproj.projectors import PROJECTORS

__all__ = ["EXPORTS", "IMAGE_BREAK", "ExportedEncoder", "export_of", "feature_layers"]

IMAGE_BREAK: Final = "v.token_embd.img_break"
"""llama.cpp's name for the embedding of the token after a row of patches."""


@frozen(kw_only=True)
class ExportedEncoder:
    """Describes how the image encoder of a ``model_type`` is written.

    :ivar projector: llama.cpp's name of the projector
    :ivar metadata: returns the metadata of this kind only, from the config and the image processor's settings; keys
        that begin with ``clip.`` are complete, others are relative to ``clip.vision.``
    :ivar pieces: yields the GGUF tensors that a tensor of the checkpoint becomes, by name
    :ivar breaks_rows: whether the file has the embedding of the token after a row of patches
    """

    projector: str
    metadata: Callable[[Any, Mapping[str, Any]], dict[str, Any]]
    pieces: Callable[[str, Tensor, Any], Iterator[tuple[str, Tensor]]]
    breaks_rows: bool = False

    def gguf_name(self, name: str) -> str | None:
        """Return the GGUF name for a checkpoint's tensor; None if it is not part of the encoder. Prefixes of older and
        newer checkpoints are accepted.
        """
        names = PROJECTORS[self.projector].names
        older = name.replace("vision_tower.vision_model.", "vision_tower.", 1)
        known = (name, older, older.removeprefix("model."), f"model.{name}")
        return next((found for each in known if (found := names.gguf_name(each)) is not None), None)


def export_of(config: Any) -> ExportedEncoder:
    """Return the description of how a model's image encoder is written.

    :param config: transformers' config of the model
    :raises UnsupportedArchitectureError: this kind of encoder cannot be written
    """
    kind = EXPORTS.get(config.model_type)
    if config.model_type == "llava" and config.vision_config.model_type == "pixtral":
        kind = EXPORTS["mistral3"]
    if kind is None:
        raise UnsupportedArchitectureError(
            f"the image encoder of model_type {shown(config.model_type)} cannot be written: expected one of "
            f"{', '.join(EXPORTS)}",
            architecture=str(config.model_type),
            supported=EXPORTS,
        )
    return kind


def _as_it_is(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    yield name, tensor


def _activation(config: Any) -> dict[str, Any]:
    act = str(config.vision_config.hidden_act)
    return {"clip.use_silu": True} if act == "silu" else {"clip.use_gelu": act.startswith("gelu")}


def feature_layers(config: Any) -> list[int]:
    """Return the layers whose outputs are the image features, counted from 1; 0 is the embeddings."""
    given, count = config.vision_feature_layer, config.vision_config.num_hidden_layers
    layers = [given] if isinstance(given, int) else list(given)
    return [layer if layer >= 0 else count + 1 + layer for layer in layers]


def _llava(config: Any, processor: Mapping[str, Any]) -> dict[str, Any]:
    layers = feature_layers(config)
    values = {"block_count": max(layers), "feature_layer": layers, "clip.has_llava_projector": True}
    if config.model_type == "llava_next":
        values["image_grid_pinpoints"] = [side for grid in config.image_grid_pinpoints for side in grid]
        values["mm_patch_merge_type"] = "spatial_unpad"
    return {**values, **_activation(config)}


def _llava_pieces(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    parts = name.split(".")
    if parts[1] == "post_ln" or (parts[1] == "blk" and int(parts[2]) >= max(feature_layers(config))):
        return
    yield name, tensor


def _gemma3(config: Any, processor: Mapping[str, Any]) -> dict[str, Any]:
    vision = config.vision_config
    side = round(config.mm_tokens_per_image**0.5)
    return {"projector.scale_factor": vision.image_size // vision.patch_size // side, **_activation(config)}


def _gemma3_pieces(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    yield name, tensor + 1 if name == "mm.soft_emb_norm.weight" else tensor


def _idefics3(config: Any, processor: Mapping[str, Any]) -> dict[str, Any]:
    size = processor["size"]["longest_edge"]
    return {"projector.scale_factor": config.scale_factor, "preproc_image_size": size, **_activation(config)}


def _pixtral(config: Any, processor: Mapping[str, Any]) -> dict[str, Any]:
    values = {"image_size": processor["size"]["longest_edge"], "attention.layer_norm_epsilon": 1e-5}
    if config.model_type == "mistral3":
        values["spatial_merge_size"] = config.spatial_merge_size
    return {**values, **_activation(config)}


def _pixtral_pieces(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    if name.endswith((".attn_q.weight", ".attn_k.weight")):
        halves = tensor.view(config.vision_config.num_attention_heads, 2, -1, tensor.shape[-1])
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    yield name, tensor


def _internvl(config: Any, processor: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "projector.scale_factor": round(1 / config.downsample_ratio),
        "preproc_min_tiles": processor["min_patches"],
        "preproc_max_tiles": processor["max_patches"],
        **_activation(config),
    }


def _qwen(config: Any, processor: Mapping[str, Any]) -> dict[str, Any]:
    vision, size = config.vision_config, processor["size"]
    return {
        "image_size": 560,  # llama.cpp requires a size, and uses it for its warm-up
        "embedding_length": getattr(vision, "embed_dim", vision.hidden_size),
        "spatial_merge_size": vision.spatial_merge_size,
        "image_min_pixels": size["shortest_edge"],
        "image_max_pixels": size["longest_edge"],
        **_activation(config),
    }


def _qwen2_vl(config: Any, processor: Mapping[str, Any]) -> dict[str, Any]:
    vision = config.vision_config
    return {**_qwen(config, processor), "feed_forward_length": vision.embed_dim * vision.mlp_ratio}


def _qwen2_5_vl(config: Any, processor: Mapping[str, Any]) -> dict[str, Any]:
    layers = config.vision_config.fullatt_block_indexes
    return {**_qwen(config, processor), "n_wa_pattern": layers[0] + 1}


def _qwen3_vl(config: Any, processor: Mapping[str, Any]) -> dict[str, Any]:
    vision = config.vision_config
    side = int(vision.num_position_embeddings**0.5)
    deep = [layer in getattr(vision, "deepstack_visual_indexes", ()) for layer in range(vision.depth)]
    return {**_qwen(config, processor), "image_size": side * vision.patch_size, "is_deepstack_layers": deep}


def _patches(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split the patch embedding of two video frames into one tensor per frame."""
    if tensor.shape[2] != 2:
        raise CheckpointError(f"patches of {tensor.shape[2]} frames have no place in a GGUF file: expected 2")
    yield name, tensor[:, :, 0]
    yield f"{name}.1", tensor[:, :, 1]


def _qwen_pieces(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    if name == "v.patch_embd.weight":
        yield from _patches(name, tensor)
    elif ".attn_qkv." in name:
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            yield name.replace("attn_qkv", f"attn_{part}"), rows
    else:
        yield name, tensor


def _qwen3_pieces(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    if name == "v.patch_embd.weight":
        yield from _patches(name, tensor)
    elif name.startswith("v.deepstack."):
        _, _, number, rest = name.split(".", 3)
        yield f"v.deepstack.{config.vision_config.deepstack_visual_indexes[int(number)]}.{rest}", tensor
    else:
        yield name, tensor


_LLAVA: Final = ExportedEncoder(projector="mlp", metadata=_llava, pieces=_llava_pieces)
_QWEN3: Final = ExportedEncoder(projector="qwen3vl_merger", metadata=_qwen3_vl, pieces=_qwen3_pieces)
_IDEFICS3: Final = ExportedEncoder(projector="idefics3", metadata=_idefics3, pieces=_as_it_is)
EXPORTS: Final[Mapping[str, ExportedEncoder]] = MappingProxyType(
    {
        "llava": _LLAVA,
        "llava_next": _LLAVA,
        "gemma3": ExportedEncoder(projector="gemma3", metadata=_gemma3, pieces=_gemma3_pieces),
        "idefics3": _IDEFICS3,
        "smolvlm": _IDEFICS3,
        "mistral3": ExportedEncoder(projector="pixtral", metadata=_pixtral, pieces=_pixtral_pieces, breaks_rows=True),
        "internvl": ExportedEncoder(projector="internvl", metadata=_internvl, pieces=_as_it_is),
        "qwen2_vl": ExportedEncoder(projector="qwen2vl_merger", metadata=_qwen2_vl, pieces=_qwen_pieces),
        "qwen2_5_vl": ExportedEncoder(projector="qwen2.5vl_merger", metadata=_qwen2_5_vl, pieces=_qwen_pieces),
        **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN3),
    }
)
"""The encoders that can be written, by Hugging Face's ``model_type``."""

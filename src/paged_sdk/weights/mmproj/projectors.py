"""Map each kind of image encoder in GGUF files to its transformers model and image processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import shown
from paged_sdk.weights.mmproj.file import MmprojFile
from paged_sdk.weights.mmproj.names import (
    CLIP,
    GEMMA3,
    IDEFICS3,
    INTERNVL,
    PIXTRAL,
    QWEN2,
    QWEN2_5,
    QWEN3,
    EncoderNames,
)

__all__ = ["PROJECTORS", "Projector"]

_GELU: Final = "gelu_pytorch_tanh"
_QWEN_WINDOW: Final = 112
"""Height and width of Qwen2.5-VL's attention windows, in pixels; converters do not write it."""


@frozen(kw_only=True)
class Projector:
    """Describes a kind of image encoder.

    :ivar names: the names of its tensors
    :ivar config: returns the content of config.json without the decoder's section
    :ivar processor: returns the name of transformers' image processor class, for Pillow, and its settings
    :ivar tokens: possible texts of the image token, whose embeddings are replaced; the first in the vocabulary counts
    :ivar after: the text after an image, if the chat template does not know of images; as in the model's training
    :ivar output: a tensor, and the dimension of it that equals the size of the encoder's output vectors
    :ivar text_type: the decoder's ``model_type`` in transformers' combined model
    :ivar decoders: the ``model_type`` of decoders that the encoder can serve; None: any decoder without M-RoPE
    :ivar edit: changes the tensors, by GGUF name, in place to those of the checkpoint
    """

    names: EncoderNames
    config: Callable[[MmprojFile], dict[str, Any]]
    processor: Callable[[MmprojFile], tuple[str, dict[str, Any]]]
    tokens: tuple[str, ...]
    after: str = ""
    output: tuple[str, int] = ("mm.2.weight", 0)
    text_type: str = "llama"
    decoders: frozenset[str] | None = None
    edit: Callable[[dict[str, Tensor], MmprojFile], None] = lambda tensors, file: None


def _tower(file: MmprojFile, model_type: str, **others: Any) -> dict[str, Any]:
    """Return the fields that the config sections of all encoders share."""
    # Older files exchange the names of an MLP's two matrices.
    shape, width = file.matrix_shape("v.blk.0.ffn_up.weight"), file.width
    side, patch = file.integer("image_size"), file.integer("patch_size")
    if file.shape("v.patch_embd.weight")[-2:] != (patch, patch):
        raise file.malformed(f"metadata clip.vision.patch_size is {patch}, and its patches have another size")
    positions = file.tensors.get("v.position_embd.weight")
    if positions is not None and positions.shape[-2] - (side // patch) ** 2 not in (0, 1):
        raise file.malformed(
            f"an image of {side} x {side} pixels has no {positions.shape[-2]} patches of {patch} x {patch}"
        )
    return {
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": shape[1] if shape[0] == width else shape[0],
        "num_hidden_layers": file.num_layers,
        "num_attention_heads": file.integer("attention.head_count"),
        "image_size": side,
        "patch_size": patch,
        "layer_norm_eps": file.number("attention.layer_norm_epsilon"),
        **others,
    }


def _colors(file: MmprojFile) -> dict[str, Any]:
    return {"image_mean": file.colors("image_mean"), "image_std": file.colors("image_std")}


def _square(file: MmprojFile) -> dict[str, int]:
    side = file.integer("image_size")
    return {"height": side, "width": side}


def _exchange_mlp(tensors: dict[str, Tensor], file: MmprojFile) -> None:
    """Restore the names of each MLP's two matrices if the file exchanges them, as older files do."""
    if file.matrix_shape("v.blk.0.ffn_up.weight")[1] == file.width:
        return
    for layer in range(file.num_layers):
        for kind in ("weight", "bias"):
            up, down = (f"v.blk.{layer}.ffn_{name}.{kind}" for name in ("up", "down"))
            if up in tensors and down in tensors:
                tensors[up], tensors[down] = tensors[down], tensors[up]


def _llava(file: MmprojFile) -> dict[str, Any]:
    if "v.post_ln.weight" in file.tensors:
        raise file.unsupported("a norm after its last layer")
    if "mm.3.weight" in file.tensors or "mm.2.weight" not in file.tensors:
        raise file.unsupported("a projection that is not of two matrices")
    has_class = "v.class_embd" in file.tensors
    kind = {"projection_dim": 16} if has_class else {"vision_use_head": False}
    act = file.activation("quick_gelu", gelu="gelu" if has_class else _GELU)
    tower = _tower(file, "clip_vision_model" if has_class else "siglip_vision_model", hidden_act=act, **kind)
    grids = _pinpoints(file)
    if bool(grids) != any(name.endswith(".image_newline") for name in file.tensors):
        raise file.unsupported("tiles but no vector after rows of them, or the reverse")
    # Without the key, the file's last layer is the one whose outputs the projector was trained on.
    layers = file.numbers("feature_layer") if file.has("feature_layer") else [tower["num_hidden_layers"]]
    if not all(isinstance(each, int) and 0 <= each <= tower["num_hidden_layers"] for each in layers) or not layers:
        raise file.malformed(f"metadata clip.vision.feature_layer is {layers}: expected numbers of layers")
    return {
        **({"model_type": "llava_next", "image_grid_pinpoints": grids} if grids else {"model_type": "llava"}),
        "vision_config": tower,
        "vision_feature_layer": layers[0] if len(layers) == 1 else layers,
        "vision_feature_select_strategy": "default" if has_class else "full",
        "multimodal_projector_bias": "mm.0.bias" in file.tensors,
    }


def _pinpoints(file: MmprojFile) -> list[list[int]]:
    """Return the sizes (height, width), in pixels, of the possible grids of tiles; empty if images are not tiled."""
    if not file.has("image_grid_pinpoints"):
        return []
    sides = file.numbers("image_grid_pinpoints")
    if len(sides) % 2 or not all(isinstance(each, int) and each > 0 for each in sides):
        raise file.malformed(f"metadata clip.vision.image_grid_pinpoints is {shown(sides)}: expected pairs of sides")
    return [[int(height), int(width)] for height, width in zip(sides[::2], sides[1::2], strict=True)]


def _llava_images(file: MmprojFile) -> tuple[str, dict[str, Any]]:
    sizes: dict[str, Any] = {"size": {"shortest_edge": file.integer("image_size")}, "crop_size": _square(file)}
    if grids := _pinpoints(file):
        return "LlavaNextImageProcessorPil", {**_colors(file), **sizes, "image_grid_pinpoints": grids}
    return "LlavaImageProcessorPil", {**_colors(file), **sizes}


def _edit_llava(tensors: dict[str, Tensor], file: MmprojFile) -> None:
    _exchange_mlp(tensors, file)
    # transformers' module requires a norm after the last layer, but the projector takes the features before it.
    for kind, make in (("weight", torch.ones), ("bias", torch.zeros)):
        tensors[f"v.post_ln.{kind}"] = make(file.width)


def _gemma3(file: MmprojFile) -> dict[str, Any]:
    act = file.activation("quick_gelu", gelu=_GELU)
    tower = _tower(file, "siglip_vision_model", hidden_act=act, vision_use_head=False)
    side = tower["image_size"] // tower["patch_size"] // file.integer("projector.scale_factor", 4)
    return {"model_type": "gemma3", "vision_config": tower, "mm_tokens_per_image": side * side}


def _idefics3(file: MmprojFile) -> dict[str, Any]:
    act = file.activation("quick_gelu", gelu=_GELU)
    return {
        "model_type": "idefics3",
        "vision_config": _tower(file, "idefics3_vision", hidden_act=act),
        "scale_factor": file.integer("projector.scale_factor"),
    }


def _idefics3_images(file: MmprojFile) -> tuple[str, dict[str, Any]]:
    tile = file.integer("image_size")
    longest = file.integer("preproc_image_size", 4 * tile)
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
    return "Idefics3ImageProcessorPil", {**_colors(file), **sizes}


def _pixtral(file: MmprojFile) -> dict[str, Any]:
    head_dim = file.width // file.integer("attention.head_count")
    tower = _tower(file, "pixtral", hidden_act=file.activation("quick_gelu", gelu="gelu"), head_dim=head_dim)
    config = {
        "vision_config": tower,
        "vision_feature_layer": -1,
        "multimodal_projector_bias": "mm.1.bias" in file.tensors,
    }
    if not file.has("spatial_merge_size") and "mm.patch_merger.weight" not in file.tensors:
        return {**config, "model_type": "llava", "vision_feature_select_strategy": "full"}
    return {**config, "model_type": "mistral3", "spatial_merge_size": file.integer("spatial_merge_size")}


def _edit_pixtral(tensors: dict[str, Tensor], file: MmprojFile) -> None:
    # The decoder's embedding table has this embedding, too.
    tensors.pop("v.token_embd.img_break", None)
    heads = file.integer("attention.head_count")
    for name, tensor in tensors.items():
        if name.endswith((".attn_q.weight", ".attn_k.weight")):
            rows = tensor.view(heads, -1, 2, tensor.shape[-1])
            tensors[name] = rows.transpose(1, 2).reshape(tensor.shape)


def _pixtral_images(file: MmprojFile) -> tuple[str, dict[str, Any]]:
    side = file.integer("patch_size")
    sizes = {
        "size": {"longest_edge": file.integer("image_size")},
        "patch_size": {"height": side, "width": side},
    }
    return "PixtralImageProcessorPil", {**_colors(file), **sizes}


def _internvl(file: MmprojFile) -> dict[str, Any]:
    has = file.tensors.__contains__
    return {
        "model_type": "internvl",
        "vision_config": _tower(
            file,
            "internvl_vision",
            hidden_act=file.activation("quick_gelu", gelu="gelu"),
            attention_bias=has("v.blk.0.attn_q.bias"),
            use_qk_norm=has("v.blk.0.attn_q_norm.weight"),
            norm_type="layer_norm" if has("v.blk.0.ln1.bias") else "rms_norm",
        ),
        "downsample_ratio": 1 / file.integer("projector.scale_factor"),
        "vision_feature_layer": -1,
    }


def _edit_internvl(tensors: dict[str, Tensor], file: MmprojFile) -> None:
    for name in ("v.class_embd", "v.position_embd.weight"):
        if name in tensors:
            tensors[name] = tensors[name].view(1, -1, tensors[name].shape[-1])


def _internvl_images(file: MmprojFile) -> tuple[str, dict[str, Any]]:
    most, fewest = file.integer("preproc_max_tiles", 12), file.integer("preproc_min_tiles", 1)
    sizes = {"size": _square(file), "min_patches": fewest, "max_patches": most}
    return "GotOcr2ImageProcessorPil", {**_colors(file), **sizes}


def _qwen_tower(file: MmprojFile, hidden_act: str) -> dict[str, Any]:
    tower = _tower(file, "", hidden_act=hidden_act)
    return {
        "depth": tower["num_hidden_layers"],
        "num_heads": tower["num_attention_heads"],
        "patch_size": tower["patch_size"],
        "spatial_merge_size": file.integer("spatial_merge_size", 2),
        "hidden_act": hidden_act,
        "intermediate_size": tower["intermediate_size"],
    }


def _qwen2_vl(file: MmprojFile) -> dict[str, Any]:
    tower = _qwen_tower(file, file.activation("quick_gelu", gelu="gelu"))
    expansion, rest = divmod(tower.pop("intermediate_size"), file.width)
    if rest:
        raise file.unsupported("MLPs that are no multiple of its width")
    out = file.matrix_shape("mm.2.weight")[0]
    sizes = {"embed_dim": file.width, "hidden_size": out, "mlp_ratio": expansion}
    return {"model_type": "qwen2_vl", "vision_config": {**tower, **sizes}}


def _qwen2_5_vl(file: MmprojFile) -> dict[str, Any]:
    tower = _qwen_tower(file, file.activation("quick_gelu", gelu="gelu"))
    period = file.integer("n_wa_pattern")
    return {
        "model_type": "qwen2_5_vl",
        "vision_config": {
            **tower,
            "hidden_size": file.width,
            "out_hidden_size": file.matrix_shape("mm.2.weight")[0],
            "window_size": file.integer("window_size", _QWEN_WINDOW),
            "fullatt_block_indexes": list(range(period - 1, tower["depth"], period)),
        },
    }


def _deepstack_layers(file: MmprojFile) -> list[int]:
    """Return the layers whose outputs are also added to the decoder's first layers (DeepStack)."""
    return [layer for layer in range(file.num_layers) if f"v.deepstack.{layer}.fc1.weight" in file.tensors]


def _qwen3_vl(file: MmprojFile) -> dict[str, Any]:
    return {
        "model_type": "qwen3_vl",
        "vision_config": {
            **_qwen_tower(file, file.activation("quick_gelu", gelu=_GELU)),
            "hidden_size": file.width,
            "out_hidden_size": file.matrix_shape("mm.2.weight")[0],
            "num_position_embeddings": file.matrix_shape("v.position_embd.weight")[0],
            "deepstack_visual_indexes": _deepstack_layers(file),
        },
    }


def _edit_qwen(tensors: dict[str, Tensor], file: MmprojFile) -> None:
    _exchange_mlp(tensors, file)
    for layer in range(file.num_layers):
        for kind in ("weight", "bias"):
            names = [f"v.blk.{layer}.attn_{part}.{kind}" for part in "qkv"]
            if all(name in tensors for name in names):
                tensors[f"v.blk.{layer}.attn_qkv.{kind}"] = torch.cat([tensors.pop(name) for name in names])
    first, second = "v.patch_embd.weight", "v.patch_embd.weight.1"
    if second in tensors:  # an image is a video of two identical frames
        tensors[first] = torch.stack((tensors[first], tensors.pop(second)), dim=2)


def _edit_qwen3(tensors: dict[str, Tensor], file: MmprojFile) -> None:
    _edit_qwen(tensors, file)
    # GGUF numbers the DeepStack mergers by encoder layer, transformers by position in their list.
    for number, layer in enumerate(_deepstack_layers(file)):
        for name in [name for name in tensors if name.startswith(f"v.deepstack.{layer}.")]:
            tensors[name.replace(f".{layer}.", f".{number}.", 1)] = tensors.pop(name)


def _qwen_images(fewest: int, most: int) -> Callable[[MmprojFile], tuple[str, dict[str, Any]]]:
    """Return the function that describes Qwen's image processor.

    :param fewest: the minimum of pixels per image if the file has none, that of the released models; ``most`` likewise
    """

    def make(file: MmprojFile) -> tuple[str, dict[str, Any]]:
        return "Qwen2VLImageProcessorPil", {
            **_colors(file),
            "patch_size": file.integer("patch_size"),
            "merge_size": file.integer("spatial_merge_size", 2),
            "size": {
                "shortest_edge": file.integer("image_min_pixels", fewest),
                "longest_edge": file.integer("image_max_pixels", most),
            },
        }

    return make


PROJECTORS: Final[Mapping[str, Projector]] = MappingProxyType(
    {
        "mlp": Projector(
            names=CLIP,
            config=_llava,
            processor=_llava_images,
            # Most of these models have Vicuna's vocabulary, which has no image token; <unk> does not occur in texts.
            tokens=("<image>", "<unk>"),
            after="\n",
            edit=_edit_llava,
        ),
        "gemma3": Projector(
            names=GEMMA3,
            config=_gemma3,
            processor=lambda file: ("Gemma3ImageProcessorPil", {**_colors(file), "size": _square(file)}),
            tokens=("<image_soft_token>", "<image>"),
            output=("mm.input_projection.weight", 1),
            text_type="gemma3_text",
            decoders=frozenset({"gemma3_text"}),
            edit=_exchange_mlp,
        ),
        "idefics3": Projector(
            names=IDEFICS3,
            config=_idefics3,
            processor=_idefics3_images,
            tokens=("<image>",),
            output=("mm.model.fc.weight", 0),
            edit=_exchange_mlp,
        ),
        "pixtral": Projector(
            names=PIXTRAL,
            config=_pixtral,
            processor=_pixtral_images,
            tokens=("[IMG]", "<image>"),
            text_type="mistral",
            edit=_edit_pixtral,
        ),
        "internvl": Projector(
            names=INTERNVL,
            config=_internvl,
            processor=_internvl_images,
            tokens=("<IMG_CONTEXT>", "<image>"),
            after="\n",
            output=("mm.model.mlp.3.weight", 0),
            text_type="qwen2",
            edit=_edit_internvl,
        ),
        "qwen2vl_merger": Projector(
            names=QWEN2,
            config=_qwen2_vl,
            processor=_qwen_images(3136, 12_845_056),
            tokens=("<|image_pad|>", "<image>"),
            text_type="qwen2_vl_text",
            decoders=frozenset({"qwen2_vl_text"}),
            edit=_edit_qwen,
        ),
        "qwen2.5vl_merger": Projector(
            names=QWEN2_5,
            config=_qwen2_5_vl,
            processor=_qwen_images(3136, 12_845_056),
            tokens=("<|image_pad|>", "<image>"),
            text_type="qwen2_5_vl_text",
            decoders=frozenset({"qwen2_vl_text"}),
            edit=_edit_qwen,
        ),
        "qwen3vl_merger": Projector(
            names=QWEN3,
            config=_qwen3_vl,
            processor=_qwen_images(65_536, 16_777_216),
            tokens=("<|image_pad|>", "<image>"),
            text_type="qwen3_vl_text",
            # Qwen 3.5's encoder is Qwen3-VL's without the vectors for later layers.
            decoders=frozenset({"qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text"}),
            edit=_edit_qwen3,
        ),
    }
)
"""The supported kinds of encoders, by llama.cpp's name of the projector."""

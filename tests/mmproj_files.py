"""Writes GGUF models with image encoders (mmproj), by the names and rules of llama.cpp's converter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
from attrs import frozen
from safetensors.torch import load_file
from torch import Tensor

import paged_sdk
from gguf_files import add_metadata
from tiny_vision import IMAGE_BREAK

__all__ = ["MMPROJ_FAMILIES", "write_mmproj", "write_vision_gguf"]

_VISION_NAMES: Final = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 64)


@frozen(kw_only=True)
class _Rules:
    """Says how a family's checkpoint is converted.

    :ivar projector: the name of the kind
    :ivar text: the prefix of the decoder's tensors, and of the output projection
    :ivar older: turns a tensor's name into the one that the gguf package's map has, or GGUF's own
    :ivar metadata: returns further values of the file
    :ivar change: returns what becomes of a tensor: name and values of each
    """

    projector: str
    text: tuple[str, str] = ("language_model.model.", "language_model.lm_head")
    older: Callable[[str], str]
    metadata: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] = lambda config, processor: {}
    change: Callable[[str, Tensor, Mapping[str, Any]], Iterator[tuple[str, Tensor]]] = lambda name, tensor, config: (
        iter([(name, tensor)])
    )


def _tower(name: str) -> str:
    return re.sub(r"^vision_tower\.", "vision_tower.vision_model.", name)


def _llava(name: str) -> str:
    """LLaVA's older converter, which is the only one, has names of its own, and exchanges those of an MLP's halves."""
    name = name.replace("multi_modal_projector.linear_1", "mm.0").replace("multi_modal_projector.linear_2", "mm.2")
    name = name.replace("vision_tower.", "v.").replace("encoder.layers", "blk").replace("embeddings.", "")
    name = name.replace("_proj", "").replace("self_attn.", "attn_").replace("layer_norm", "ln")
    name = name.replace("layernorm", "ln").replace("mlp.fc1", "ffn_down").replace("mlp.fc2", "ffn_up")
    return name.replace("embedding", "embd").replace("layrnorm", "ln")


def _kept_llava(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    last = f".layers.{config['vision_config']['num_hidden_layers'] - 1}."
    if "post_layernorm" not in name and last not in name:
        yield name, tensor


def _gemma3(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    yield name.replace("_weight", ".weight"), tensor + 1 if "soft_emb_norm" in name else tensor


def _pixtral(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config["vision_config"]["num_attention_heads"]
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    yield name, tensor


def _qwen(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    if ".qkv." in name:
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            yield name.replace("qkv", part), rows
    elif name.endswith("patch_embed.proj.weight"):
        yield "v.patch_embd.weight", tensor[:, :, 0]
        yield "v.patch_embd.weight.1", tensor[:, :, 1]
    else:
        yield name, tensor


def _qwen3(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    name = name.removeprefix("model.")
    if name.startswith("visual.deepstack_merger_list."):
        _, _, number, stem, kind = name.split(".")
        layer = config["vision_config"]["deepstack_visual_indexes"][int(number)]
        yield f"v.deepstack.{layer}.{stem.removeprefix('linear_')}.{kind}", tensor
    elif name.startswith("visual.merger."):
        stem, kind = name.split(".")[2:]
        own = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
        yield f"{own[stem]}.{kind}", tensor
    elif ".qkv." in name:
        yield name, tensor
    else:
        yield from _qwen(name, tensor, config)


def _qwen_values(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Mapping[str, Any]:
    size, vision = processor["size"], config["vision_config"]
    return {
        "clip.vision.embedding_length": vision.get("embed_dim", vision["hidden_size"]),
        "clip.vision.image_min_pixels": size["shortest_edge"],
        "clip.vision.image_max_pixels": size["longest_edge"],
    }


def _internvl(name: str) -> str:
    halves = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}
    if name.startswith("multi_modal_projector."):
        _, stem, kind = name.split(".")
        return f"{halves[stem]}.{kind}"
    if "lambda_" in name or "position_embeddings" in name:
        name += ".weight"
    return f"model.{name}"


def _idefics3_values(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "clip.vision.projector.scale_factor": config["scale_factor"],
        "clip.vision.preproc_image_size": processor["size"]["longest_edge"],
        "clip.use_gelu": True,
    }


def _gemma3_values(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Mapping[str, Any]:
    vision = config["vision_config"]
    side = int(config["mm_tokens_per_image"] ** 0.5)
    scale = vision["image_size"] // vision["patch_size"] // side
    return {"clip.vision.projector.scale_factor": scale, "clip.use_gelu": True}


_IDEFICS3: Final = _Rules(
    projector="idefics3", text=("model.text_model.", "lm_head"), older=str, metadata=_idefics3_values
)
_QWEN3: Final = _Rules(
    projector="qwen3vl_merger",
    text=("model.language_model.", "lm_head"),
    older=str,
    change=_qwen3,
    metadata=lambda config, processor: {
        **_qwen_values(config, processor),
        "clip.use_gelu": True,
        "clip.vision.spatial_merge_size": config["vision_config"]["spatial_merge_size"],
        "clip.vision.image_size": 28,
    },
)
_RULES: Final[dict[str, _Rules]] = {
    "llava": _Rules(
        projector="mlp",
        older=_llava,
        metadata=lambda config, processor: {
            "clip.has_llava_projector": True,
            "clip.vision.block_count": config["vision_config"]["num_hidden_layers"] - 1,
            "clip.use_gelu": config["vision_config"]["model_type"] == "siglip_vision_model",
        },
        change=_kept_llava,
    ),
    "llava_next": _Rules(
        projector="mlp",
        older=lambda name: "model.image_newline" if name == "image_newline" else _llava(name),
        metadata=lambda config, processor: {
            "clip.has_llava_projector": True,
            "clip.vision.block_count": config["vision_config"]["num_hidden_layers"] - 1,
            "clip.vision.mm_patch_merge_type": "spatial_unpad",
            "clip.vision.image_grid_pinpoints": [side for grid in config["image_grid_pinpoints"] for side in grid],
        },
        change=_kept_llava,
    ),
    "gemma3": _Rules(projector="gemma3", older=_tower, metadata=_gemma3_values, change=_gemma3),
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "mistral3": _Rules(
        projector="pixtral",
        older=str,
        metadata=lambda config, processor: {
            "clip.vision.spatial_merge_size": config["spatial_merge_size"],
            "clip.use_gelu": True,
            "clip.vision.attention.layer_norm_epsilon": 1e-5,
        },
        change=_pixtral,
    ),
    "qwen2_vl": _Rules(
        projector="qwen2vl_merger", text=("model.", "lm_head"), older=str, change=_qwen, metadata=_qwen_values
    ),
    "qwen2_5_vl": _Rules(
        projector="qwen2.5vl_merger",
        text=("model.", "lm_head"),
        older=str,
        change=_qwen,
        metadata=lambda config, processor: {
            **_qwen_values(config, processor),
            "clip.use_silu": True,
            "clip.vision.n_wa_pattern": config["vision_config"]["fullatt_block_indexes"][0] + 1,
        },
    ),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "pixtral": _Rules(
        projector="pixtral",
        older=str,
        metadata=lambda config, processor: {"clip.use_gelu": True, "clip.vision.attention.layer_norm_epsilon": 1e-5},
        change=_pixtral,
    ),
    "internvl": _Rules(
        projector="internvl",
        older=_internvl,
        metadata=lambda config, processor: {
            "clip.vision.projector.scale_factor": int(1 / config["downsample_ratio"]),
            "clip.vision.preproc_min_tiles": processor["min_patches"],
            "clip.vision.preproc_max_tiles": processor["max_patches"],
            "clip.use_gelu": True,
        },
    ),
}
MMPROJ_FAMILIES: Final = tuple(name for name in _RULES if name != "pixtral")  # a model of LLaVA's


def write_vision_gguf(name: str, checkpoint: Path, directory: Path, *, type: str = "F32") -> tuple[Path, Path]:
    """Write a checkpoint's decoder and its image encoder as two files, and return these.

    :param type: of the encoder's matrices
    """
    directory.mkdir(parents=True, exist_ok=True)
    model = paged_sdk.write_gguf(checkpoint, directory / "model.gguf", type="F32")
    return model, write_mmproj(name, checkpoint, directory / "mmproj-model.gguf", type=type)


def write_mmproj(name: str, checkpoint: Path, path: Path, *, type: str = "F32", **changes: Any) -> Path:
    """Write a checkpoint's image encoder.

    :param changes: metadata to write instead
    """
    rules = _RULES[name]
    config = json.loads((checkpoint / "config.json").read_text())
    processor = json.loads((checkpoint / "preprocessor_config.json").read_text())
    vision, size = config["vision_config"], config["text_config"]["hidden_size"]
    side, patch = (
        each[0] if isinstance(each, list) else each for each in map(vision.get, ("image_size", "patch_size"))
    )
    values: dict[str, Any] = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": rules.projector,
        "clip.vision.projection_dim": size,
        "clip.vision.image_size": side or 560,
        "clip.vision.patch_size": patch,
        "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": vision.get("intermediate_size", vision["hidden_size"]),
        "clip.vision.block_count": vision.get("num_hidden_layers", vision.get("depth")),
        "clip.vision.attention.head_count": vision.get("num_attention_heads", vision.get("num_heads")),
        "clip.vision.attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6),
        "clip.vision.image_mean": processor["image_mean"],
        "clip.vision.image_std": processor["image_std"],
        **rules.metadata(config, processor),
        **changes,
    }
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    add_metadata(writer, values)
    kept = gguf.GGMLQuantizationType[type]
    for own, tensor in load_file(checkpoint / "model.safetensors").items():
        if rules.projector == "pixtral" and own.endswith("embed_tokens.weight"):
            writer.add_tensor("v.token_embd.img_break", tensor[IMAGE_BREAK].numpy())
        if own.startswith(rules.text):
            continue
        for changed, part in rules.change(own, tensor, config):
            _write(writer, _gguf_name(rules.older(changed)), part, kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    if name.startswith(("v.", "mm.", "model.image_newline")):
        return name
    found = _VISION_NAMES.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _write(writer: gguf.GGUFWriter, name: str, tensor: Tensor, type: gguf.GGMLQuantizationType) -> None:
    values = tensor.float().numpy()
    is_small = values.ndim != 2 or "position_embd" in name or values.shape[-1] % 32
    if type is gguf.GGMLQuantizationType.F32 or is_small:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, type), raw_dtype=type)

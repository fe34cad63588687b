"""Make tiny checkpoints with random weights of every class of transformers that takes images and generates text."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from benchmarks.tiny_classes import OWN, SMALL, make_lively
from paged_sdk.vision.whole_processor import WholeProcessor

__all__ = [
    "IMAGE_MODEL_TYPES",
    "CannotBeMadeError",
    "image_class_of",
    "make_image_checkpoint",
    "picture",
    "tiny_image_config",
]

IMAGE_MODEL_TYPES: Final = tuple(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)

_AUTO: Final = "transformers.models.auto."
_IMAGE_PROCESSORS: Final[Any] = import_module(f"{_AUTO}image_processing_auto").IMAGE_PROCESSOR_MAPPING_NAMES
_PROCESSORS: Final[Any] = import_module(f"{_AUTO}processing_auto").PROCESSOR_MAPPING_NAMES
_MOST_PARAMETERS: Final = 30_000_000
_CHARACTERS: Final = ["\n", *map(chr, range(32, 127)), *map(chr, range(0x391, 0x391 + 160))]
_NAMED: Final = re.compile(r"tokenizer\.(\w+_token)(?:_id)?\b")
_MARKS: Final = re.compile(r'["\'](<[^"\'\s<>{}]{1,40}>|\[[A-Z_]+\])["\']')
_END: Final = "<|end|>"
_IMAGE: Final = "<image>"
_TEMPLATE: Final = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ 'PLACEHOLDER' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)

# Names of fields of encoders' configs, with a small value for each; set where a class has the field.
_SMALL_ENCODER: Final = MappingProxyType(
    {
        **dict.fromkeys(("hidden_size", "embed_dim", "d_model"), 32),
        **dict.fromkeys(("intermediate_size", "mlp_dim", "encoder_ffn_dim"), 48),
        **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "n_layers"), 3),
        **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads", "encoder_attention_heads"), 4),
        **dict.fromkeys(("out_hidden_size", "projection_dim", "text_hidden_size", "output_dim"), 64),
        "head_dim": 8,
        "image_size": 28,
        "patch_size": 7,
        "window_size": 28,
        "num_position_embeddings": 16,
        "fullatt_block_indexes": [1],
        "deepstack_visual_indexes": [0, 1],
        "encoder_hidden_size": 32,
        "pos_emb_height": 8,
        "pos_emb_width": 8,
    }
)
# Contexts must be long, because images have many tokens.
_LONG: Final[dict[str, Any]] = SMALL | dict.fromkeys(("max_position_embeddings", "max_seq_len", "n_positions"), 2048)
_GRID: Final = {"patch_size": 7, "size": {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}}

# Additional fields of some classes' configs, by section ("" for the whole).
_IN_TILES: Final = ("idefics3", "smolvlm")
_IN_GRIDS: Final = ("llava_next", "llava_next_video", "llava_onevision", "granite4_vision")
_GRIDS: Final[dict[str, Any]] = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}
_GRIDS_IN_CONFIG: Final[dict[str, Any]] = {"": _GRIDS}


def _rotated(*sections: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections)}
    return {"text_config": {"rope_parameters": rope, "sliding_window": None}}


_HALF_ROTATED: Final = _rotated(2, 1, 1)
_ROTATED: Final = _rotated(2, 3, 3)
_OWN_CONFIG: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    **dict.fromkeys(
        (
            *("glm4v", "glm46v", "glmga", "paddleocr_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
            "cosmos3_edge",
            *("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
        ),
        _ROTATED,
    ),
    **dict.fromkeys(("glm4v_moe", "glm_ocr"), _HALF_ROTATED),
    **dict.fromkeys(_IN_GRIDS, _GRIDS_IN_CONFIG),
    "ernie4_5_vl_moe": _rotated(3, 3, 2),
    "qwen2_vl": _ROTATED | {"vision_config": {"hidden_size": 64}},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "gemma3": {"": {"mm_tokens_per_image": 16}, "vision_config": {"vision_use_head": False}},
    "granite_docling": {"vision_config": {"scale_factor": 2}},
    "aria": {"vision_config": {"patch_size": 14, "image_size": 490}},
    "vipllava": {"": {"vision_feature_layers": [-1, -2]}},
}
# Settings of image processors, and of processors, of some classes.
_TILES: Final[dict[str, Any]] = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
_OWN_IMAGES: Final[Mapping[str, Mapping[str, Any]]] = {
    **dict.fromkeys(_IN_TILES, _TILES),
    **dict.fromkeys(_IN_GRIDS, _GRIDS),
    "lighton_ocr": {"size": {"longest_edge": 56}},
    "paligemma": {"size": {"height": 28, "width": 28}, "image_seq_length": 16},
}
_LLAVA: Final[dict[str, Any]] = {
    "patch_size": 7,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
_SIXTEEN_TOKENS: Final[dict[str, Any]] = {"image_seq_length": 16}
_FOUR_TOKENS: Final[dict[str, Any]] = {"image_seq_len": 4}
_OWN_PROCESSOR: Final[Mapping[str, Mapping[str, Any]]] = {
    **dict.fromkeys(("llava", "llava_next", "llava_next_video", "video_llava", "vipllava"), _LLAVA),
    **dict.fromkeys(_IN_TILES, _FOUR_TOKENS),
    "granite_docling": _FOUR_TOKENS,
    "qianfan_ocr": {"image_seq_length": 4},
    "aya_vision": {"patch_size": 7, "img_size": 28, "downsample_factor": 2},
    "llava_onevision": {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    "lighton_ocr": {"patch_size": 7, "spatial_merge_size": 2},
    "granite4_vision": _LLAVA | {"downsample_rate": "1/2"},
    **dict.fromkeys(("ovis2", "gemma3"), _SIXTEEN_TOKENS),
}
_NAMES_ANYWAY: Final = (
    "image_token",
    "eos_token",
    "bos_token",
    "pad_token",
    "unk_token",
    "add_bos_token",
    "add_eos_token",
)
_OWN_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "cohere_compass": {"image_token": "<|IMAGE_PAD|>"},
    "gemma4": {name: f"<{name}>" for name in ("audio_token", "boa_token", "eoa_token")},
}
# Classes whose processor checkpoints name, for classes without a processor in transformers.
_PROCESSOR_OF: Final[Mapping[str, str]] = {
    "glm4v_moe": "glm4v",
    "glm_ocr": "glm46v",
    "glmga": "glm46v",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen2_5_omni_thinker": "qwen2_5_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe",
    "cosmos3_omni": "qwen3_vl",
    "fast_vlm": "llava",
    "mistral4": "mistral3",
}


def picture(height: int, width: int, *, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return an image of large random patches, which remain distinguishable at any scale."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    rows, columns = np.arange(height) * 4 // height, np.arange(width) * 4 // width
    return coarse[rows][:, columns]


class CannotBeMadeError(Exception):
    """Raised if no tiny checkpoint of a class can be made; the message says why."""


def image_class_of(model_type: str) -> Any:
    """Return transformers' class of a model type."""
    return getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type])


def make_image_checkpoint(model_type: str, directory: Path) -> PreTrainedModel:
    """Save a tiny model with tokenizer, chat template and processor, and return it.

    :raises CannotBeMadeError: no tiny checkpoint can be made
    """
    try:
        tokenizer = _write_tokenizer(model_type, directory)
        _write_template(model_type, directory, "")
        _write_processor(model_type, directory)
        processor = WholeProcessor(directory, model_type)
        placeholder = processor.placeholder
        text = processor.prompt(placeholder, [picture(40, 60)])["input_ids"][0].tolist()
    except CannotBeMadeError:
        raise
    except Exception as error:  # processors with missing requirements
        reason = _first_line(error).replace(f"{directory}: ", "").removeprefix("its processor ")
        raise CannotBeMadeError(f"its processor ({reason})") from error
    (image_token, _), *_ = Counter(text).most_common(1)
    _write_template(model_type, directory, placeholder)
    marks = sorted(set(text) - {image_token})
    config = tiny_image_config(model_type, vocab_size=tokenizer.get_vocab_size(), image_token=image_token, marks=marks)
    try:
        torch.manual_seed(0)
        make: Any = AutoModelForImageTextToText.from_config
        model: PreTrainedModel = make(config, dtype=torch.float32).eval()
    except Exception as error:  # classes that need other packages
        raise CannotBeMadeError(f"its class ({_first_line(error)})") from error
    make_lively(model)
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(_END)}))
    return model


def tiny_image_config(
    model_type: str, *, vocab_size: int = 384, image_token: int = 260, marks: Sequence[int] = ()
) -> PreTrainedConfig:
    """Return the smallest config that still has the class's distinctive features.

    :param marks: other tokens that the processor writes for an image
    :raises CannotBeMadeError: no small config is possible
    """
    try:
        config = _config(model_type, vocab_size, image_token)
        if hasattr(config, "visual_indicator_token_ids"):  # images replace the embeddings of these too
            config.visual_indicator_token_ids = [*marks, *range(vocab_size - 5, vocab_size)][:5]
        make: Any = AutoModelForImageTextToText.from_config
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in make(copy.deepcopy(config)).parameters())
    except Exception as error:  # configs validate themselves with errors of many classes
        raise CannotBeMadeError(f"its config ({_first_line(error)})") from error
    if size > _MOST_PARAMETERS:
        raise CannotBeMadeError(f"its config is not made small here ({size} parameters)")
    return config


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("Class validation error")]
    text = next((line for line in lines if line), type(error).__name__)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _config(model_type: str, vocab_size: int, image_token: int) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    own = _OWN_CONFIG.get(model_type, {})
    sections: dict[str, Any] = {}
    for name in default.sub_configs:
        section = getattr(default, name, None)
        if section is None and name not in own:
            continue
        kind = str(own.get(name, {}).get("model_type") or getattr(section, "model_type", ""))
        section = CONFIG_MAPPING[kind]() if section is None else section
        is_text = name == "text_config"
        sizes = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), vocab_size)
        fields = _small(_LONG | sizes if is_text else _SMALL_ENCODER, section)
        sections[name] = {"model_type": kind, **fields, **(OWN.get(kind, {}) if is_text else {}), **own.get(name, {})}
    known = set(default.to_dict())
    whole = {name: value for name, value in _LONG.items() if name in known} | {"tie_word_embeddings": False}
    if "vocab_size" in known:
        whole["vocab_size"] = vocab_size
    tokens = {name: image_token for name in ("image_token_id", "image_token_index") if hasattr(default, name)}
    made = config_class(**{**whole, **tokens, **sections, **own.get("", {})})
    assert isinstance(made, PreTrainedConfig)
    return made


def _small(numbers: Mapping[str, Any], section: Any) -> dict[str, Any]:
    default = section.to_dict()
    fields = {name: value for name, value in numbers.items() if name in {*default, *section.attribute_map.values()}}
    for name, value in fields.items():
        if isinstance(default.get(name), list) and isinstance(value, int) and name.endswith("_size"):
            fields[name] = [value] * min(len(default[name]), 4)
    return fields


def _write_tokenizer(model_type: str, directory: Path) -> Tokenizer:
    """Save a tokenizer with a token for each character, and for every special token in the processor's source."""
    tokenizer = Tokenizer(models.WordLevel({each: place for place, each in enumerate(_CHARACTERS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    own = _processor_class(model_type)
    marks = dict.fromkeys(("<unk>", "<s>", "</s>", _END, _IMAGE, *_MARKS.findall(_source(own))))
    marks |= dict.fromkeys(_named(model_type).values())
    marks |= dict.fromkeys(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))
    tokenizer.add_special_tokens(list(marks))
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def _named(model_type: str) -> dict[str, str]:
    """Return the special tokens that the processor looks up by attributes of the tokenizer."""
    names = _NAMED.findall(_source(_processor_class(model_type)))
    own = {name: f"<{name}>" for name in names if name not in _NAMES_ANYWAY}
    return {"image_token": _IMAGE, **own, **_OWN_NAMES.get(model_type, {})}


def _write_template(model_type: str, directory: Path, placeholder: str) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "bos_token": "<s>",
        "unk_token": "<unk>",
        "pad_token": "<unk>",
        "extra_special_tokens": _named(model_type),
        "chat_template": _TEMPLATE.replace("PLACEHOLDER", placeholder),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_processor(model_type: str, directory: Path) -> None:
    backends = _IMAGE_PROCESSORS.get(model_type) or _IMAGE_PROCESSORS.get(_PROCESSOR_OF.get(model_type, ""))
    if backends is None:
        raise CannotBeMadeError("transformers has no image processor for it")
    if "pil" not in backends and not find_spec("torchvision"):
        raise CannotBeMadeError("its image processor needs torchvision")
    image_class: Any = getattr(transformers, backends.get("pil") or backends["torchvision"])
    default = image_class()
    settings: dict[str, Any] = {}
    size = getattr(default, "size", None)
    if size is not None:
        settings["size"] = {name: 56 if name == "longest_edge" else 28 for name in dict(size)}
    for name, value in (("crop_size", {"height": 28, "width": 28}), ("patch_size", 7)):
        if getattr(default, name, None) is not None:
            settings[name] = value if not isinstance(getattr(default, name), Mapping) else {"height": 7, "width": 7}
    if getattr(default, "crop_size", None) is not None:
        settings["crop_size"] = {"height": 28, "width": 28}
    if getattr(default, "merge_size", None) is not None:
        settings |= _GRID
    settings |= _OWN_IMAGES.get(model_type, {})
    image_class(**settings).save_pretrained(directory)
    own = _processor_class(model_type)
    more = {"processor_class": own.__name__, **_OWN_PROCESSOR.get(model_type, {})}
    (directory / "processor_config.json").write_text(json.dumps(more))


def _processor_class(model_type: str) -> Any:
    name = _PROCESSORS.get(model_type) or _PROCESSORS.get(_PROCESSOR_OF.get(model_type, ""))
    if name is None:
        raise CannotBeMadeError("transformers has no processor for it")
    return getattr(transformers, name)


def _source(own: Any) -> str:
    return inspect.getsource(import_module(own.__module__))

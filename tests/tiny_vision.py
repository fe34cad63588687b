"""Make tiny checkpoints of models that take images, with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
import transformers
from attrs import frozen
from transformers import PreTrainedModel

import tiny
from paged_sdk.vision.family import find_vision_family

__all__ = ["IMAGE_BREAK", "VISION_FAMILIES", "encoder_inputs", "make_vision_checkpoint", "picture", "reference_answer"]

_TOKENS: Final = (
    "<image>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<|vision_start|>",
    "<|vision_end|>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    "<start_of_image>",
    "<end_of_image>",
    "<img>",
    "</img>",
)
_IMAGE_TOKEN: Final = tiny.VOCAB_SIZE
IMAGE_BREAK: Final = _IMAGE_TOKEN + 1
_VOCAB_SIZE: Final = tiny.VOCAB_SIZE + len(_TOKENS)

_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ 'PLACEHOLDER' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_TEXT: Final = tiny.COMMON | {"vocab_size": _VOCAB_SIZE}
_VISION: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
    "initializer_range": 0.3,
}


@frozen(kw_only=True)
class _Family:
    """Says how a tiny model of a family is made.

    :ivar config: the fields of its transformers config, sections as mappings
    :ivar processor: the name of its image processor, and its settings
    :ivar placeholder: what a chat template writes for an image
    :ivar is_recurrent: whether layers of its decoder keep a state instead of keys and values
    """

    config: Mapping[str, Any]
    processor: str
    settings: Mapping[str, Any]
    placeholder: str = "<image>"
    extra_settings: Mapping[str, Any] = {}
    is_recurrent: bool = False


_PINPOINTS: Final = [[28, 56], [56, 28], [56, 56]]
_QWEN_TEXT: Final[dict[str, Any]] = {
    **{name: value for name, value in _TEXT.items() if name != "head_dim"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
}

_QWEN35_TEXT: Final[dict[str, Any]] = {
    **_TEXT,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 32,  # of which half is rotated
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
_QWEN_SETTINGS: dict[str, Any] = {"patch_size": 7, "size": {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}}
_QWEN3_VISION: Final[dict[str, Any]] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_heads": 4,
    "patch_size": 7,
    "num_position_embeddings": 16,
    "initializer_range": 0.3,
}

VISION_FAMILIES: Final[dict[str, _Family]] = {
    "llava": _Family(
        config={
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **_VISION},
            "image_token_index": _IMAGE_TOKEN,
        },
        processor="LlavaImageProcessorPil",
        settings={"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
    ),
    "llava_next": _Family(
        config={
            "text_config": {"model_type": "mistral", **_TEXT, "sliding_window": None},
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **_VISION},
            "image_token_index": _IMAGE_TOKEN,
            "image_grid_pinpoints": _PINPOINTS,
        },
        processor="LlavaNextImageProcessorPil",
        settings={
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
            "image_grid_pinpoints": _PINPOINTS,
        },
    ),
    "mistral3": _Family(
        config={
            "text_config": {"model_type": "mistral", **_TEXT, "sliding_window": None},
            "vision_config": {"model_type": "pixtral", **_VISION, "head_dim": 8, "image_size": 56},
            "image_token_index": _IMAGE_TOKEN,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "tie_word_embeddings": False,
        },
        processor="PixtralImageProcessorPil",
        settings={"size": {"longest_edge": 56}, "patch_size": {"height": 7, "width": 7}},
    ),
    "idefics3": _Family(
        config={
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": {"model_type": "idefics3_vision", **_VISION},
            "image_token_id": _IMAGE_TOKEN,
            "scale_factor": 2,
        },
        processor="Idefics3ImageProcessorPil",
        settings={"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
    ),
    "smolvlm": _Family(
        config={
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": {"model_type": "smolvlm_vision", **_VISION},
            "image_token_id": _IMAGE_TOKEN,
            "scale_factor": 2,
        },
        processor="SmolVLMImageProcessorPil",
        settings={"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
    ),
    "internvl": _Family(
        config={
            "text_config": {"model_type": "qwen2", **{name: _TEXT[name] for name in _TEXT if name != "head_dim"}},
            "vision_config": {"model_type": "internvl_vision", **_VISION, "image_size": [28, 28], "patch_size": [7, 7]},
            "image_token_id": _IMAGE_TOKEN,
            "downsample_ratio": 0.5,
            "tie_word_embeddings": False,
        },
        processor="GotOcr2ImageProcessorPil",
        settings={"size": {"height": 28, "width": 28}, "max_patches": 4},
    ),
    "qwen2_vl": _Family(
        config={
            "text_config": {"model_type": "qwen2_vl_text", **_QWEN_TEXT},
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 4,
                "patch_size": 7,
                "initializer_range": 0.3,
            },
            "image_token_id": _IMAGE_TOKEN,
        },
        processor="Qwen2VLImageProcessorPil",
        settings=_QWEN_SETTINGS,
        placeholder="<|vision_start|><image><|vision_end|>",
    ),
    "gemma4": _Family(
        config={
            "text_config": {
                "model_type": "gemma4_text",
                **_TEXT,
                "num_hidden_layers": 6,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                "global_head_dim": 32,
                "sliding_window": 12,
                "num_kv_shared_layers": 3,
                "use_double_wide_mlp": True,
                "hidden_size_per_layer_input": 16,
                "vocab_size_per_layer_input": _VOCAB_SIZE,
            },
            "vision_config": {
                "model_type": "gemma4_vision",
                **_VISION,
                "num_key_value_heads": 4,
                "head_dim": 8,
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            },
            "image_token_id": _IMAGE_TOKEN,
            "tie_word_embeddings": False,
        },
        processor="Gemma4ImageProcessorPil",
        settings={"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
    ),
    "gemma3": _Family(
        config={
            "text_config": {
                "model_type": "gemma3_text",
                **_TEXT,
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                "sliding_window": 12,
                "query_pre_attn_scalar": 16,
            },
            "vision_config": {"model_type": "siglip_vision_model", **_VISION, "vision_use_head": False},
            "image_token_index": _IMAGE_TOKEN,
            "mm_tokens_per_image": 16,
            "tie_word_embeddings": False,
        },
        processor="Gemma3ImageProcessorPil",
        settings={"size": {"height": 28, "width": 28}},
        placeholder="<start_of_image>",
    ),
    "qwen3_vl": _Family(
        config={
            "text_config": {
                "model_type": "qwen3_vl_text",
                **_TEXT,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
            "image_token_id": _IMAGE_TOKEN,
        },
        processor="Qwen2VLImageProcessorPil",
        settings=_QWEN_SETTINGS,
        placeholder="<|vision_start|><image><|vision_end|>",
    ),
    "qwen3_vl_moe": _Family(
        config={
            "text_config": {
                "model_type": "qwen3_vl_moe_text",
                **_TEXT,
                "num_hidden_layers": 3,
                "mlp_only_layers": [1],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 48,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
            "image_token_id": _IMAGE_TOKEN,
        },
        processor="Qwen2VLImageProcessorPil",
        settings=_QWEN_SETTINGS,
        placeholder="<|vision_start|><image><|vision_end|>",
    ),
    "qwen3_5": _Family(
        config={
            "text_config": {"model_type": "qwen3_5_text", **_QWEN35_TEXT},
            "vision_config": _QWEN3_VISION,
            "image_token_id": _IMAGE_TOKEN,
        },
        processor="Qwen2VLImageProcessorPil",
        settings=_QWEN_SETTINGS,
        placeholder="<|vision_start|><image><|vision_end|>",
        is_recurrent=True,
    ),
    "qwen3_5_moe": _Family(
        config={
            "text_config": {
                "model_type": "qwen3_5_moe_text",
                **_QWEN35_TEXT,
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 48,
            },
            "vision_config": _QWEN3_VISION,
            "image_token_id": _IMAGE_TOKEN,
        },
        processor="Qwen2VLImageProcessorPil",
        settings=_QWEN_SETTINGS,
        placeholder="<|vision_start|><image><|vision_end|>",
        is_recurrent=True,
    ),
    "lfm2_vl": _Family(
        config={
            "text_config": {
                "model_type": "lfm2",
                **_TEXT,
                "num_hidden_layers": 4,
                "layer_types": ["conv", "conv", "full_attention", "conv"],
                "block_multiple_of": 16,
            },
            "vision_config": {
                "model_type": "siglip2_vision_model",
                **{name: value for name, value in _VISION.items() if name != "image_size"},
                "num_patches": 16,
                "vision_use_head": False,
            },
            "image_token_id": _IMAGE_TOKEN,
            "projector_hidden_size": 48,
        },
        processor="Lfm2VlImageProcessor",
        settings={
            "encoder_patch_size": 7,
            "tile_size": 28,
            "min_image_tokens": 4,
            "max_image_tokens": 9,
            "max_tiles": 4,
        },
        is_recurrent=True,
    ),
    "qwen2_5_vl": _Family(
        config={
            "text_config": {"model_type": "qwen2_5_vl_text", **_QWEN_TEXT},
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "num_heads": 4,
                "patch_size": 7,
                "window_size": 28,
                "fullatt_block_indexes": [1],
                "initializer_range": 0.3,
            },
            "image_token_id": _IMAGE_TOKEN,
        },
        processor="Qwen2VLImageProcessorPil",
        settings=_QWEN_SETTINGS,
        placeholder="<|vision_start|><image><|vision_end|>",
    ),
}


def tokenizer() -> tokenizers.Tokenizer:
    """Return the tokenizer of :mod:`tiny` with the marks of every family."""
    own = tokenizers.Tokenizer.from_str(tiny.tokenizer().to_str())
    own.add_special_tokens(list(_TOKENS))
    assert own.get_vocab_size() == _VOCAB_SIZE
    return own


def picture(height: int, width: int, *, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return an image of large random patches, which look different however they are scaled."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (4, 4, 3), np.uint8)
    rows, columns = np.arange(height) * 4 // height, np.arange(width) * 4 // width
    return coarse[rows][:, columns]


def make_vision_checkpoint(name: str, directory: Path, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Save a tiny model of a family, with tokenizer, chat template and image processor, and return it.

    :param changes: fields of the config
    """
    family = VISION_FAMILIES[name]
    config = transformers.AutoConfig.for_model(name, **{**family.config, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        maker: Any = transformers.AutoModelForImageTextToText  # it has no annotations
        model: Any = maker.from_config(config).float().eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
            elif not parameter.any():  # Gemma's projection of images begins with zeros, and would show nothing
                parameter.data.normal_()
    model.save_pretrained(directory)
    tokenizer().save(str(directory / "tokenizer.json"))
    _save_processor(family.processor, family.settings, directory)
    settings = {"eos_token": "<|im_end|>", "chat_template": _TEMPLATE.replace("PLACEHOLDER", family.placeholder)}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    if family.extra_settings:
        (directory / "processor_config.json").write_text(json.dumps(dict(family.extra_settings)))
    built: PreTrainedModel = model
    return built


def _save_processor(name: str, settings: Mapping[str, Any], directory: Path) -> None:
    if name == "Lfm2VlImageProcessor":  # which needs torchvision
        content = {"image_processor_type": name, **settings}
        (directory / "preprocessor_config.json").write_text(json.dumps(content))
        return
    processor: Any = getattr(transformers, name)(**settings)
    processor.save_pretrained(directory)


def encoder_inputs(config: Mapping[str, Any], directory: Path, pictures: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return what transformers' encoder takes of some images.

    :param config: the model's config
    :param directory: a checkpoint
    """
    family = find_vision_family(config)
    loader: Any = transformers.AutoImageProcessor
    if family.processor is None:
        processor = loader.from_pretrained(directory, backend="pil")
    else:  # tests/vision/test_lfm2_images.py compares what it makes
        processor = family.processor(json.loads((directory / "preprocessor_config.json").read_text()))
    made = processor(images=list(pictures), return_tensors="pt", **family.options(config))
    return {name: made[name] for name in family.encoder_inputs if name in made}


def reference_answer(
    model: PreTrainedModel, token_ids: Sequence[int], inputs: Mapping[str, torch.Tensor], num_tokens: int
) -> list[int]:
    """Return transformers' own greedy tokens after a prompt with images.

    :param token_ids: the prompt, images' tokens in their places
    :param inputs: what the image processor gives
    """
    prompt = torch.tensor([list(token_ids)])
    types = (prompt == _IMAGE_TOKEN).int()
    untyped: Any = model
    with torch.inference_mode():
        made = untyped.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            **inputs,
            **({"mm_token_type_ids": types} if "image_grid_thw" in inputs else {}),
            **({"token_type_ids": types} if untyped.config.model_type == "gemma3" else {}),
            max_new_tokens=num_tokens,
            do_sample=False,
            use_cache=True,
        )
    return list(map(int, made[0, prompt.shape[1] :]))

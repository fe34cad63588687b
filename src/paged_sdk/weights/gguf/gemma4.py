"""Read and write what GGUF's metadata says of Gemma 4, whose layers differ in their heads and their MLPs."""

from __future__ import annotations

from typing import Any, Final

import torch

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.rope import RopeConfig, RopeKind
from paged_sdk.errors import shown
from paged_sdk.weights.gguf.model import GgufModel

__all__ = ["gemma4_assistant_config", "gemma4_config", "gemma4_divisors", "gemma4_metadata", "why_not_gemma4"]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_NOT_ROTATED: Final = 1e30  # the converter's divisor of frequencies that are 0
_LEAST_NOT_ROTATED: Final = 1e20
_DIVISORS: Final = "rope_freqs.weight"


def gemma4_config(model: GgufModel) -> dict[str, Any]:
    """Return the fields of config.json that Gemma 4 has besides those of all models.

    :raises CheckpointError: a key or tensor is missing or malformed
    :raises UnsupportedArchitectureError: the layers differ in another way than in released models
    """
    windowed = model.windowed()
    counts, sizes = model.of_layers("attention.head_count_kv"), model.of_layers("feed_forward_length")
    full_size, size = model.head_dim, model.integer("attention.key_length_swa")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if model.integer(key, size) != size:
            raise model.unsupported(f"metadata {model.architecture}.{key} other than attention.key_length_swa = {size}")
    num_shared = model.integer("attention.shared_kv_layers", 0, minimum=0)
    own = model.num_layers - num_shared
    wide = [2 * sizes[0] if layer >= own else sizes[0] for layer in range(model.num_layers)]
    if sizes not in (wide, [sizes[0]] * model.num_layers):
        raise model.unsupported(f"metadata {model.architecture}.feed_forward_length = {shown(sizes)}")
    full = [layer for layer in range(own) if not windowed[layer]]
    first_windowed = windowed.index(True) if any(windowed) else 0
    config: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": False,
        "intermediate_size": sizes[0],
        "head_dim": size,
        "num_key_value_heads": counts[first_windowed],
        "per_layer_config": {
            str(layer): {"head_dim": full_size, "num_key_value_heads": counts[layer]}
            for layer, has_window in enumerate(windowed)
            if not has_window
        },
        "layer_types": [_SLIDING if has_window else _FULL for has_window in windowed],
        "sliding_window": model.integer("attention.sliding_window"),
        "attention_k_eq_v": bool(full) and all(f"blk.{layer}.attn_v.weight" not in model.tensors for layer in full),
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": sizes == wide and num_shared > 0,
        "final_logit_softcapping": model.number("final_logit_softcapping", 0.0) or None,
        "rope_scaling": None,
        "rope_parameters": {
            _FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": _rotated_share(model, full_size),
                "rope_theta": model.number("rope.freq_base", 10_000.0),
            },
            _SLIDING: {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", 10_000.0)},
        },
    }
    input_size = model.integer("embedding_length_per_layer_input", 0, minimum=0)
    config["hidden_size_per_layer_input"] = input_size
    if input_size:
        config["vocab_size_per_layer_input"] = model.tensor("per_layer_token_embd.weight").shape[0]
    if model.has_experts:
        config |= {
            "enable_moe_block": True,
            "num_experts": model.integer("expert_count"),
            "top_k_experts": model.integer("expert_used_count"),
            "moe_intermediate_size": model.integer("expert_feed_forward_length"),
        }
    return config


def gemma4_assistant_config(model: GgufModel) -> dict[str, Any]:
    """Return the fields of config.json that an assistant of Gemma 4 has besides those of all models.

    :raises CheckpointError: see :func:`gemma4_config`; :class:`UnsupportedArchitectureError` likewise
    """
    return gemma4_config(model) | {"backbone_hidden_size": model.integer("embedding_length_out")}


def _rotated_share(model: GgufModel, head_dim: int) -> float:
    """Return the share of the frequencies that rotate, in layers with full attention."""
    divisors = model.factors(_DIVISORS, head_dim)
    num_rotated = next((n for n, each in enumerate(divisors) if each != 1.0), len(divisors))
    if any(each < _LEAST_NOT_ROTATED for each in divisors[num_rotated:]):
        raise model.unsupported(f"other numbers in {_DIVISORS} than 1 and {_NOT_ROTATED:g}")
    return 2 * num_rotated / head_dim


def gemma4_metadata(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of Gemma 4, without the architecture's prefix; those that all models have are among them.

    :param config: a model for which :func:`why_not_gemma4` returns None
    """
    windows, shapes = config.sliding_windows, config.layer_shapes
    window = next((width for width in windows if width is not None), None)
    full_size = next(shape.head_dim for shape, width in zip(shapes, windows, strict=True) if width is None)
    size = next((shape.head_dim for shape, width in zip(shapes, windows, strict=True) if width is not None), full_size)
    full, local = (_rope_of(config, has_window=has_window) for has_window in (False, True))
    values: dict[str, Any] = {
        "attention.key_length": full_size,
        "attention.value_length": full_size,
        "attention.key_length_swa": size,
        "attention.value_length_swa": size,
        "attention.head_count_kv": _same_or_each([shape.num_kv_heads for shape in shapes]),
        "feed_forward_length": _same_or_each([shape.intermediate_size for shape in shapes]),
        "attention.shared_kv_layers": sum(not shape.keeps_kv for shape in shapes),
        "attention.sliding_window": window or config.max_position,
        "attention.sliding_window_pattern": [width is not None for width in windows],
        "embedding_length_per_layer_input": 0 if config.layer_inputs is None else config.layer_inputs.size,
        "rope.dimension_count": full_size,
        "rope.dimension_count_swa": size,
        "rope.freq_base": float(full.theta),
        "rope.freq_base_swa": float(local.theta),
    }
    if config.logit_softcap is not None:
        values["final_logit_softcapping"] = float(config.logit_softcap)
    if config.assistant is not None:
        values |= {
            "embedding_length_out": config.assistant.target_size,
            "nextn_predict_layers": config.num_layers,
        }
    return values


def gemma4_divisors(config: DecoderConfig) -> torch.Tensor:
    """Return the divisors of the frequencies of layers with full attention, which every file has."""
    rope = _rope_of(config, has_window=False)
    divisors = torch.tensor(rope.inv_freq_divisors or (1.0,) * (rope.rotary_dim // 2), dtype=torch.float32)
    return divisors.clamp(max=_NOT_ROTATED)


def why_not_gemma4(config: DecoderConfig) -> str | None:
    """Return why GGUF cannot describe a model, or None if it can."""
    windows, shapes = config.sliding_windows, config.layer_shapes
    by_kind = {(shape.head_dim, width is None) for shape, width in zip(shapes, windows, strict=True)}
    first_shared = next((layer for layer, shape in enumerate(shapes) if shape.kv_layer is not None), config.num_layers)
    # llama.cpp counts back from the first layer that shares keys: the last one has full attention.
    sources = {first_shared - (2 if width is not None else 1) for width in windows[first_shared:]}
    reasons = {
        "it has no biases of attention": config.qkv_bias or config.output_bias,
        "it has no other activation than tanh-approximated GELU": config.activation is not Activation.GELU_TANH,
        "it has no scaling of rotary embeddings": any(rope.kind is not RopeKind.DEFAULT for rope in config.ropes),
        "it has one size of heads for layers with windows, and one for the others": len(by_kind) > 2
        or len({is_full for _, is_full in by_kind}) < len(by_kind),
        "its layers share the keys of the last two others": any(
            shape.kv_layer not in sources for shape in shapes[first_shared:]
        ),
        "its layers with windows rotate whole heads": any(
            rope.inv_freq_divisors for rope, width in zip(config.ropes, windows, strict=True) if width is not None
        ),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def _rope_of(config: DecoderConfig, *, has_window: bool) -> RopeConfig:
    """Return the rotary embedding of the layers with or without windows; without such layers, that of the last."""
    pairs = zip(config.ropes, config.sliding_windows, strict=True)
    return next((rope for rope, width in pairs if (width is not None) == has_window), config.ropes[-1])


def _same_or_each(numbers: list[int]) -> int | list[int]:
    return numbers[0] if len(set(numbers)) == 1 else numbers

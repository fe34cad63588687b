"""Make the configs of GGUF files with latent attention, and describe such models by GGUF's keys, as llama.cpp reads
them.
"""

from __future__ import annotations

import math
from typing import Any, Final

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.latent_attention import LatentAttentionConfig
from paged_sdk.config.rope import RopeConfig, RopeKind
from paged_sdk.weights.gguf.model import GgufModel
from paged_sdk.weights.gguf.routing import latent_experts

__all__ = ["latent_config", "latent_metadata", "why_not_latent"]

# llama.cpp takes models of so many layers for those whose queries have no latent vector (DeepSeek-V2-Lite and others),
# and no others.
_LITE: Final = frozenset({26, 27})
_ALSO_LITE: Final = (48, 128_256)  # layers, and tokens of the vocabulary


def latent_config(model: GgufModel) -> dict[str, Any]:
    """Return the settings of latent attention.

    Older files, which have the projections of keys and of values in one tensor, describe the heads that these make.
    """
    _must_be_plain(model)
    rope_dim = model.integer("rope.dimension_count")
    key_dim = model.integer("attention.key_length_mla", model.integer("attention.key_length"))
    if key_dim <= rope_dim:
        raise model.malformed(f"its keys of {key_dim} elements have {rope_dim} that are rotated")
    has_query_rank = "blk.0.attn_q_a.weight" in model.tensors
    experts = latent_experts(model) if model.has_experts else {"model_type": "youtu"}
    return {
        **experts,
        "num_key_value_heads": model.integer("attention.head_count"),
        "kv_lora_rank": model.integer("attention.kv_lora_rank"),
        "q_lora_rank": model.integer("attention.q_lora_rank") if has_query_rank else None,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": model.integer("attention.value_length_mla", model.integer("attention.value_length")),
        "rope_interleave": True,
        "rope_scaling": _rope_scaling(model),
        "latent_norm_eps": model.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": False,
        "mlp_bias": False,
    }


def _must_be_plain(model: GgufModel) -> None:
    """Refuse what llama.cpp computes for this architecture, and nothing here does.

    :raises UnsupportedArchitectureError: the file has such a setting
    """
    for key in ("attention.temperature_scale", "attention.temperature_length"):
        if model.number(key, 0.0):
            raise model.unsupported(f"metadata {model.architecture}.{key}")
    if (factor := model.number("rope.scaling.attn_factor", 1.0)) != 1.0:
        raise model.unsupported(f"metadata {model.architecture}.rope.scaling.attn_factor = {factor}")


def _rope_scaling(model: GgufModel) -> dict[str, Any] | None:
    """Return the settings of YaRN. llama.cpp scales cosines and sines only where the file has no factor of scores, and
    then scores too, by its square.
    """
    kind = model.metadata.get(f"{model.architecture}.rope.scaling.type", "none")
    factor = model.number("rope.scaling.factor", 1.0) or 1.0
    if kind != "yarn":
        if kind not in ("none", "linear") or factor != 1.0:
            raise model.unsupported(f"rope scaling {kind!r} by {factor}")
        return None
    mscale = model.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": model.integer(
            "rope.scaling.original_context_length", model.integer("context_length")
        ),
        "mscale_all_dim": mscale or 1.0,
        "attention_factor": 1.0 if mscale else _mscale(factor, 1.0),
    }


def latent_metadata(config: DecoderConfig, latent: LatentAttentionConfig, rope: RopeConfig) -> dict[str, Any]:
    """Return the keys that describe latent attention, without the architecture's name; see :func:`why_not_latent`."""
    values: dict[str, Any] = {
        "attention.key_length": latent.key_dim,
        "attention.value_length": latent.rank,
        "attention.key_length_mla": latent.query_dim,
        "attention.value_length_mla": latent.value_dim,
        "attention.kv_lora_rank": latent.rank,
    }
    if latent.query_rank is not None:
        values["attention.q_lora_rank"] = latent.query_rank
    if rope.kind is RopeKind.YARN:
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * (rope.mscale_all_dim or 0.0)
    if config.moe is None:  # llama.cpp does not do without these
        values |= {
            "leading_dense_block_count": config.num_layers,
            "expert_feed_forward_length": config.intermediate_size,
            "expert_shared_count": 0,
        }
    return values


def why_not_latent(config: DecoderConfig, latent: LatentAttentionConfig, rope: RopeConfig) -> str | None:
    """Return what GGUF lacks for a model with latent attention, or None if it lacks nothing."""
    if not rope.interleaved:
        return "GGUF has no latent attention that rotates the halves of a head"
    if config.qkv_bias or config.output_bias or config.mlp_bias:
        return "GGUF has no latent attention with biases"
    if rope.kind not in (RopeKind.DEFAULT, RopeKind.DYNAMIC, RopeKind.YARN):
        return f"GGUF has no latent attention with a rotary embedding of the kind {rope.kind.value}"
    if rope.kind is RopeKind.YARN and not rope.mscale_all_dim:
        return "GGUF has no latent attention with YaRN without a factor of scores (mscale_all_dim)"
    is_lite = config.num_layers in _LITE or (config.num_layers, config.vocab_size) == _ALSO_LITE
    if is_lite != (latent.query_rank is None):
        kind = "without a latent vector of queries" if latent.query_rank is None else "with a latent vector of queries"
        return f"llama.cpp has no model {kind} of {config.num_layers} layers"
    return None


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

"""Describe a model's configuration by GGUF metadata, with the keys that llama.cpp reads.

:mod:`paged_sdk.weights.gguf.config` is the inverse.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any, Final

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig, NormKind
from paged_sdk.config.recurrent import GatedDeltaConfig, Mamba2Config, ShortConvConfig
from paged_sdk.config.rope import RopeConfig
from paged_sdk.errors import UnsupportedArchitectureError
from paged_sdk.weights.gguf.config import GEMMA3_LOCAL_THETA, GEMMA3_PERIOD
from paged_sdk.weights.gguf.gemma4 import gemma4_metadata, why_not_gemma4
from paged_sdk.weights.gguf.latent_attention import latent_metadata, why_not_latent
from paged_sdk.weights.gguf.mamba import mamba_metadata, why_not_mamba
from paged_sdk.weights.gguf.names import ARCHITECTURES
from paged_sdk.weights.gguf.rope import global_rope, rope_metadata
from paged_sdk.weights.gguf.routing import SHARED_SIZE, missing_in_gguf, routing_metadata

__all__ = ["config_metadata", "gguf_architecture", "not_writable", "table_of", "with_mtp_layer"]

_OF_MIXTURES: Final = MappingProxyType({"nemotron_h": "nemotron_h_moe"})
"""Names of architectures of models with experts, where those without have another."""
_ARCHITECTURE_OF: Final = MappingProxyType(
    # Encoders and gpt-oss are only read: gpt-oss's checkpoints interleave the rows of the experts' gate and up.
    {
        each.model_type: name
        for name, each in ARCHITECTURES.items()
        if name not in ("gpt-oss", *_OF_MIXTURES.values()) and not each.is_encoder
    }
    | dict.fromkeys(("mistral", "ministral", "mixtral"), "llama")
    | {"olmo3": "olmo2", "qwen2_5_vl_text": "qwen2vl", "granitemoeshared": "granitemoe"}
    | dict.fromkeys(("youtu", "deepseek_v3", "glm4_moe_lite"), "deepseek2")
)


def table_of(config: DecoderConfig) -> str:
    """Return GGUF's name for the architecture that has the tensor names of a model's checkpoints.

    :raises UnsupportedArchitectureError: the architecture cannot be written as GGUF
    """
    found = _ARCHITECTURE_OF.get(config.model_type)
    if config.moe is not None:
        found = _OF_MIXTURES.get(config.model_type, found)
    if found is None:
        why = "no GGUF architecture is written for it; with_isq (--isq) quantizes the checkpoint while loading"
        raise not_writable(config, why)
    return found


def gguf_architecture(config: DecoderConfig) -> str:
    """Return GGUF's name for the architecture of a model. As in llama.cpp, Granite 4 without Mamba-2 layers is granite.

    :raises UnsupportedArchitectureError: the architecture cannot be written as GGUF
    """
    found = table_of(config)
    if found != "granitehybrid" or config.recurrent_layers:
        return found
    if config.moe is not None or not all(rope.rotates for rope in config.ropes):
        raise not_writable(config, "GGUF has no such model with attention in all layers, and experts or no positions")
    return "granite"


def config_metadata(config: DecoderConfig, attention_factor: float) -> dict[str, Any]:
    """Return the GGUF metadata that describes a model's configuration, by key.

    :param attention_factor: LongRoPE's factor on cosines and sines; unused for other kinds
    :raises UnsupportedArchitectureError: GGUF has no keys for a feature of the model
    """
    name, rope = gguf_architecture(config), global_rope(config)
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        f"attention.layer_norm_{'rms_' if config.norm is NormKind.RMS else ''}epsilon": float(config.norm_eps),
    }
    if not config.attention_layers:
        values |= {"feed_forward_length": 0, "attention.head_count": 0} | _recurrent(config)
        return {f"{name}.{key}": value for key, value in values.items()}
    values |= {
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }
    if config.latent is not None:
        if (lack := why_not_latent(config, config.latent, rope)) is not None:
            raise not_writable(config, lack)
        values |= latent_metadata(config, config.latent, rope)
    values |= rope_metadata(rope, name, attention_factor)
    if config.moe is not None:
        values |= _mixture(config, name)
    if name in ("gemma2", "gemma3"):
        values |= _gemma(config, name)
    if config.recurrent_layers:
        values |= _recurrent(config)
    elif config.recurrent:
        raise not_writable(config, "GGUF has no such model with attention in all layers")
    if config.num_image_layers:
        values["n_deepstack_layers"] = config.num_image_layers
    values |= _factors(config, name)
    if name in ("gemma4", "gemma4-assistant"):
        if (reason := why_not_gemma4(config)) is not None:
            raise not_writable(config, f"of GGUF's Gemma 4, {reason}")
        values |= gemma4_metadata(config)
    match config.model_type:
        case "olmo3" | "exaone_moe":
            values |= _windows(config, rope)
        case "apertus" if config.activation is not Activation.XIELU:
            raise not_writable(config, f"GGUF has no such model with activation {config.activation.value}")
        case "stablelm":
            values["use_parallel_residual"] = config.parallel_residual
        case "mpt":
            values["attention.max_alibi_bias"] = _largest_exponent(config)
            if config.qkv_clip is not None:
                values["attention.clamp_kqv"] = config.qkv_clip
    if name in ("cohere2", "exaone4", "afmoe") and any(config.sliding_windows):
        values["attention.sliding_window"] = max(width for width in config.sliding_windows if width is not None)
    return {f"{name}.{key}": value for key, value in values.items()}


def _recurrent(config: DecoderConfig) -> dict[str, Any]:
    match next(iter(config.recurrent_layers.values())):
        case ShortConvConfig() as conv:
            return _convolutions(config, conv)
        case GatedDeltaConfig() as delta:
            return _delta(config, delta)
        case Mamba2Config() as mamba:
            if (what := why_not_mamba(config, mamba)) is not None:
                raise not_writable(config, f"GGUF has no {what}")
            return mamba_metadata(config, mamba)


def _convolutions(config: DecoderConfig, conv: ShortConvConfig) -> dict[str, Any]:
    """Return what says which layers of LFM2 have a convolution: those without KV heads."""
    convs = config.recurrent_layers
    if conv.bias:
        raise not_writable(config, "GGUF has no biases of convolutions")
    counts = [0 if layer in convs else config.num_kv_heads for layer in range(config.num_layers)]
    return {"attention.head_count_kv": counts, "shortconv.l_cache": conv.kernel_size}


def _delta(config: DecoderConfig, delta: GatedDeltaConfig) -> dict[str, Any]:
    """Return what describes gated delta networks, and says which layers have one."""
    deltas = config.recurrent_layers
    if delta.key_dim != delta.value_dim:
        raise not_writable(config, "GGUF has no gated delta networks with values of another size than keys")
    if config.qkv_bias or config.output_bias:
        raise not_writable(config, "GGUF has no biases of gated attention")
    if config.moe is None and config.model_type == "qwen3_next":
        raise not_writable(config, "GGUF has no qwen3next without experts")
    values: dict[str, Any] = {
        "ssm.conv_kernel": delta.kernel_size,
        "ssm.state_size": delta.key_dim,
        "ssm.group_count": delta.num_key_heads,
        "ssm.time_step_rank": delta.num_value_heads,
        "ssm.inner_size": delta.value_width,
    }
    interval = config.attention_layers[0] + 1
    if list(config.attention_layers) == list(range(interval - 1, config.num_layers, interval)):
        return values | {"full_attention_interval": interval}
    return values | {"attention.recurrent_layers": [layer in deltas for layer in range(config.num_layers)]}


def with_mtp_layer(values: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a file that has a layer for multi-token prediction, too, after the model's own layers.

    :param values: :func:`config_metadata`'s
    """
    name = next(iter(values)).partition(".")[0]
    recurrent = f"{name}.attention.recurrent_layers"
    found = values | {f"{name}.block_count": values[f"{name}.block_count"] + 1, f"{name}.nextn_predict_layers": 1}
    return found | ({recurrent: [*values[recurrent], False]} if recurrent in values else {})


def _mixture(config: DecoderConfig, architecture: str) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    if (lacking := missing_in_gguf(config, moe, architecture)) is not None:
        raise not_writable(config, f"GGUF has no key for {lacking} in such models")
    values: dict[str, Any] = {"expert_count": moe.num_experts, "expert_used_count": moe.num_experts_per_token}
    if config.model_type != "mixtral":
        values["expert_feed_forward_length"] = moe.intermediate_size
    if moe.shared_intermediate_size is not None:
        values[SHARED_SIZE] = moe.shared_intermediate_size
    if architecture in ("granitemoe", "granitehybrid"):  # whose experts have the size of MLPs
        values["feed_forward_length"] = moe.intermediate_size
    return values | routing_metadata(moe, architecture)


def _factors(config: DecoderConfig, name: str) -> dict[str, Any]:
    """Return the multipliers that some families apply to embeddings, residuals, scores and logits."""
    values: dict[str, float] = {}
    if name == "falcon-h1":  # whose factors are in the weights
        return {}
    if name in ("granite", "granitemoe", "granitehybrid"):
        values = {
            "embedding_scale": config.embedding_scale or 1.0,
            "residual_scale": config.residual_scale or 1.0,
            "attention.scale": config.attention_scale,
            "logit_scale": 1.0 / (config.logit_scale or 1.0),  # in GGUF a divisor
        }
    elif config.logit_scale is not None:
        values = {"logit_scale": config.logit_scale}
    return {key: float(value) for key, value in values.items()}


def _windows(config: DecoderConfig, full: RopeConfig) -> dict[str, Any]:
    """Return the keys of sliding windows, of architectures that are nothing without."""
    windows = config.sliding_windows
    if not any(windows):
        raise not_writable(config, "GGUF has no such model without sliding windows")
    local = next(rope for rope, width in zip(config.ropes, windows, strict=True) if width is not None)
    values: dict[str, Any] = {
        "attention.sliding_window": max(width for width in windows if width is not None),
        "attention.sliding_window_pattern": [width is not None for width in windows],
    }
    return values if local.theta == full.theta else values | {"rope.freq_base_swa": float(local.theta)}


def _largest_exponent(config: DecoderConfig) -> float:
    """Return ALiBi's maximum exponent: -log2 of the last slope of the largest power of two of heads."""
    whole = 1 << (config.num_heads.bit_length() - 1)
    return -math.log2(config.alibi_slopes[whole - 1])


def _gemma(config: DecoderConfig, name: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    windows = config.sliding_windows
    if (window := next((width for width in windows if width is not None), None)) is not None:
        values["attention.sliding_window"] = window
    # 0 means no cap; if the keys are missing, gemma2's default caps apply.
    if name == "gemma2":
        values["attn_logit_softcapping"] = float(config.attention_softcap or 0.0)
        values["final_logit_softcapping"] = float(config.logit_softcap or 0.0)
    elif config.logit_softcap is not None:
        values["final_logit_softcapping"] = float(config.logit_softcap)
    if name == "gemma3":
        full = [layer for layer, width in enumerate(windows) if width is None]
        period = full[0] + 1 if full else 0
        if window is not None and period != GEMMA3_PERIOD:
            values["attention.sliding_window_pattern"] = period
        local = next((rope for rope, width in zip(config.ropes, windows, strict=True) if width is not None), None)
        if local is not None and local.theta != GEMMA3_LOCAL_THETA:
            values["rope.freq_base_swa"] = float(local.theta)
    return values


def not_writable(config: DecoderConfig, why: str) -> UnsupportedArchitectureError:
    """Return the error for a model that cannot be written as a GGUF file.

    :param why: what GGUF lacks
    """
    return UnsupportedArchitectureError(
        f"this {config.model_type} model cannot be written as GGUF: {why}",
        architecture=config.model_type,
        supported=ARCHITECTURES,
    )

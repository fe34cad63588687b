"""Read and write the settings of rotary embeddings, by the keys and tensors that llama.cpp reads."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.rope import RopeConfig, RopeKind
from paged_sdk.errors import shown
from paged_sdk.weights.gguf.model import GgufModel

__all__ = [
    "DIVISORS",
    "LONG_FACTORS",
    "ROPE_TENSORS",
    "SHORT_FACTORS",
    "check_positions",
    "global_rope",
    "rope_metadata",
    "rope_scaling",
    "rope_sections",
]

DIVISORS: Final = "rope_freqs.weight"
"""The tensor with a divisor for each rotary frequency."""
SHORT_FACTORS: Final = "rope_factors_short.weight"
LONG_FACTORS: Final = "rope_factors_long.weight"
"""The tensors with LongRoPE's divisors."""
ROPE_TENSORS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "llama": (DIVISORS, LONG_FACTORS, SHORT_FACTORS),
        "phi3": (LONG_FACTORS, SHORT_FACTORS),
        **dict.fromkeys(("apertus", "exaone4", "exaone-moe", "gemma4", "gemma4-assistant"), (DIVISORS,)),
    }
)
"""The tensors of rotary factors that llama.cpp reads, by architecture."""

# Architectures that may rotate only a part of each head.
_PARTLY_ROTATED: Final = frozenset(
    {"phi3", "glm4", "nemotron", "phi2", "stablelm", "qwen3next", "qwen35", "qwen35moe"} | {"glm4moe", "minimax-m2"}
)
# Of these, llama.cpp reads YaRN's own parameters, and a factor of queries that grows with their position. For all
# others it takes YaRN's defaults, whatever a file says.
_WITH_PARAMETERS: Final = frozenset({"mistral3"})
_BETA_FAST, _BETA_SLOW = "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"
_LOG_MULTIPLIER, _TEMPERATURE = "rope.scaling.yarn_log_multiplier", "attention.temperature_scale"
_CONTEXT: Final = "rope.scaling.original_context_length"


def check_positions(model: GgufModel) -> None:
    """Refuse partial rotation and rotary factors in architectures that have none, in llama.cpp either.

    :raises UnsupportedArchitectureError: only a part of each head is rotated, or there are tensors of rotary factors
    """
    if model.rotary_dim != model.head_dim and model.architecture not in _PARTLY_ROTATED:
        raise model.unsupported(f"{model.rotary_dim} of {model.head_dim} elements per head rotated")
    for name in (DIVISORS, LONG_FACTORS, SHORT_FACTORS):
        if name in model.tensors and name not in ROPE_TENSORS.get(model.architecture, ()):
            raise model.unsupported(f"a tensor {shown(name)}")


def rope_scaling(model: GgufModel) -> dict[str, Any] | None:
    """Return the scaling of the rotary embedding as ``rope_scaling`` in config.json; None: there is none.

    YaRN's own keys (``yarn_attn_factor``, ``yarn_beta_fast``, ...) are read for the architectures for which llama.cpp
    reads them.
    """
    kind = model.metadata.get(f"{model.architecture}.rope.scaling.type", "linear")
    factor = model.number("rope.scaling.factor", model.number("rope.scale_linear", 1.0)) or 1.0
    if LONG_FACTORS in model.tensors and (model.architecture == "phi3" or kind == "longrope"):
        return _longrope(model, factor)
    scaling: dict[str, Any] = {}
    if kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": _trained_context(model),
        }
    elif kind == "linear" and factor != 1.0:
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear") and (kind != "longrope" or model.architecture != "phi3"):
        # Phi-3's LongRoPE is recognized by its tensors, which older files have without naming the kind.
        raise model.unsupported(f"rope scaling {shown(kind)}")
    if model.architecture in _WITH_PARAMETERS:
        scaling |= _parameters(model, kind)
    if DIVISORS in model.tensors:
        scaling["inv_freq_divisors"] = model.factors(DIVISORS, model.head_dim)
    if (attn_factor := model.number("rope.scaling.attn_factor", 1.0)) != 1.0:
        scaling["gguf_attn_factor"] = attn_factor
    return {"rope_type": "default"} | scaling if scaling else None


def _trained_context(model: GgufModel) -> int:
    return model.integer(_CONTEXT, model.integer("context_length"))


def _parameters(model: GgufModel, kind: str) -> dict[str, Any]:
    """Return YaRN's own parameters, and the factor of queries. As in llama.cpp, ``mscale`` is 1."""
    found: dict[str, Any] = {
        "original_max_position_embeddings": _trained_context(model),
        "llama_4_scaling_beta": model.number(_TEMPERATURE, 0.0),
    }
    if kind != "yarn":
        return found
    return found | {
        "beta_fast": model.number(_BETA_FAST, 32.0),
        "beta_slow": model.number(_BETA_SLOW, 1.0),
        "mscale": 1.0,
        "mscale_all_dim": model.number(_LOG_MULTIPLIER, 0.0),
    }


def _longrope(model: GgufModel, factor: float) -> dict[str, Any]:
    if factor != 1.0:
        raise model.unsupported(
            f"metadata {model.architecture}.rope.scaling.factor = {factor} beside LongRoPE's tensors"
        )
    rotary_dim = model.rotary_dim
    return {
        "rope_type": "longrope",
        "short_factor": model.factors(SHORT_FACTORS, rotary_dim),
        "long_factor": model.factors(LONG_FACTORS, rotary_dim),
        "original_max_position_embeddings": _trained_context(model),
        # Converters compute it; without the key, llama.cpp applies no factor.
        "attention_factor": model.number("rope.scaling.attn_factor", 1.0),
    }


def rope_sections(model: GgufModel) -> dict[str, Any]:
    """Return the rotary settings of models with M-RoPE: positions in time, height and width."""
    key = f"{model.architecture}.rope.dimension_sections"
    sections = model.metadata.get(key)
    if not isinstance(sections, list) or len(sections) not in (3, 4) or any(sections[3:]):
        raise model.malformed(f"metadata {key} is {shown(sections)}: expected three numbers, and 0")
    return (rope_scaling(model) or {"rope_type": "default"}) | {"mrope_section": sections[:3]}


def global_rope(config: DecoderConfig) -> RopeConfig:
    """Return the rotary embedding of the first full-attention layer, or of the first layer if all have windows. Layers
    without positions are skipped.
    """
    layers = [pair for pair in zip(config.ropes, config.sliding_windows, strict=True) if pair[0].rotates]
    return next((rope for rope, window in layers if window is None), layers[0][0] if layers else config.ropes[0])


def rope_metadata(rope: RopeConfig, architecture: str, attention_factor: float) -> dict[str, Any]:
    """Return the keys that describe a rotary embedding, without the architecture's prefix.

    :param architecture: GGUF's name of the model's architecture
    :param attention_factor: LongRoPE's factor on cosines and sines; unused for other kinds
    """
    values: dict[str, Any] = {}
    if rope.rotates:
        values = {"rope.dimension_count": rope.rotary_dim, "rope.freq_base": float(rope.theta)}
    match rope.kind:
        case RopeKind.LINEAR:
            values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.factor)}
        case RopeKind.YARN:
            values |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(rope.factor),
                _CONTEXT: rope.original_max_position,
            }
        case RopeKind.LONGROPE:
            values |= {
                "rope.scaling.type": "longrope",
                _CONTEXT: rope.original_max_position,
                "rope.scaling.attn_factor": float(attention_factor),
            }
    if rope.kind is not RopeKind.LONGROPE and rope.gguf_attn_factor != 1.0:
        values["rope.scaling.attn_factor"] = float(rope.gguf_attn_factor)
    if architecture in _WITH_PARAMETERS and rope.kind is RopeKind.YARN:
        values |= {
            _BETA_FAST: float(rope.beta_fast),
            _BETA_SLOW: float(rope.beta_slow),
            _LOG_MULTIPLIER: float(rope.mscale_all_dim or 0.0),
        }
    if architecture in _WITH_PARAMETERS and rope.query_scale_beta:
        values |= {_CONTEXT: rope.original_max_position, _TEMPERATURE: float(rope.query_scale_beta)}
    if axes := rope.axis_of_frequency:
        values["rope.dimension_sections"] = [axes.count(axis) for axis in range(4)]
    return values

"""Describe mixtures of experts that differ from Mixtral's, by the GGUF keys that llama.cpp reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.moe import MoeConfig
from paged_sdk.weights.gguf.model import GgufModel

__all__ = [
    "SHARED_SIZE",
    "afmoe_config",
    "ernie_config",
    "exaone_moe_config",
    "gating_functions",
    "grouped_config",
    "hunyuan_moe_config",
    "latent_experts",
    "minimax_config",
    "missing_in_gguf",
    "routing_keys",
    "routing_metadata",
]

SHARED_SIZE: Final = "expert_shared_feed_forward_length"
_SHARED_COUNT, _SCALE = "expert_shared_count", "expert_weights_scale"
_FIRST, _NORM, _GATE = "leading_dense_block_count", "expert_weights_norm", "expert_gating_func"
_GROUPS, _GROUPS_USED = "expert_group_count", "expert_group_used_count"
_NO_GATE, _SOFTMAX_GATE, _SIGMOID_GATE = 0, 1, 2

# Of deepseek2, the file says whether weights are a softmax or sigmoids.
_BOTH: Final = frozenset({"deepseek2"})
_GROUPED: Final = _BOTH | {"glm4moe", "dots1", "exaone-moe", "nemotron_h_moe", "afmoe"}
# Architectures whose first layers may have a dense MLP.
_WITH_DENSE: Final = (_GROUPED - {"nemotron_h_moe"}) | {"lfm2moe", "ernie4_5-moe"}
_SIGMOIDS: Final = (_GROUPED - _BOTH) | {"lfm2moe", "minimax-m2"}
# GLM 4.7 Flash, whose older files do not say that its weights are sigmoids: layers, and tokens of the vocabulary.
_SIGMOIDS_UNSAID: Final = frozenset({(47, 154_880), (48, 154_880)})
# Keys of which the value is read for these architectures; others must not have them.
_KEYS: Final[Mapping[str, Collection[str]]] = MappingProxyType(
    dict.fromkeys(("qwen2moe", "qwen3next", "qwen35moe", "granitemoe", "granitehybrid"), (SHARED_SIZE,))
    | dict.fromkeys(_GROUPED, (_SHARED_COUNT, SHARED_SIZE, _SCALE, _GROUPS))
    | {"ernie4_5-moe": (_SHARED_COUNT, SHARED_SIZE), "hunyuan-moe": (_SHARED_COUNT, SHARED_SIZE)}
)
# Every fourth layer of EXAONE has no window, unless files say otherwise.
_WINDOW_PERIOD: Final = 4
# llama.cpp scores groups of experts by the sum of so many of their largest weights.
_GROUP_SCORE_SIZE: Final = 2
# llama.cpp divides by no smaller sum of weights.
_SMALLEST_SUM: Final = 2.0**-14


def routing_keys(architecture: str) -> Collection[str]:
    """Return which keys of shared experts and of their choice an architecture has."""
    return _KEYS.get(architecture, ())


def gating_functions(architecture: str) -> tuple[int, ...]:
    """Return the values that ``expert_gating_func`` may have; the last is that of files without the key."""
    if architecture in _BOTH:
        return _NO_GATE, _SIGMOID_GATE, _SOFTMAX_GATE
    return (_NO_GATE, _SIGMOID_GATE) if architecture in _SIGMOIDS else (_NO_GATE, _SOFTMAX_GATE)


def grouped_config(
    model: GgufModel, count: str = "n_routed_experts", shared_count: str = "n_shared_experts"
) -> dict[str, Any]:
    """Return the settings of experts that are chosen from groups, with shared experts.

    :param count: the config's field with the number of experts; ``shared_count`` likewise of shared ones
    """
    return {
        count: model.integer("expert_count"),
        shared_count: model.integer(_SHARED_COUNT),
        "moe_intermediate_size": model.integer("expert_feed_forward_length"),
        "first_k_dense_replace": model.integer(_FIRST, 0, minimum=0),
        "routed_scaling_factor": model.number(_SCALE, 0.0) or 1.0,
        "norm_topk_prob": model.metadata.get(f"{model.architecture}.{_NORM}", False) is True,
        "n_group": model.integer(_GROUPS, 1, minimum=0) or 1,
        "topk_group": model.integer(_GROUPS_USED, 1, minimum=0) or 1,
    }


def afmoe_config(model: GgufModel) -> dict[str, Any]:
    """Return the settings of AFMoE's experts, by its names."""
    found = grouped_config(model, "num_experts", "num_shared_experts")
    own = {
        "first_k_dense_replace": "num_dense_layers",
        "routed_scaling_factor": "route_scale",
        "norm_topk_prob": "route_norm",
    }
    return {own.get(key, key): value for key, value in found.items()}


def latent_experts(model: GgufModel) -> dict[str, Any]:
    """Return the settings of experts of deepseek2: those of DeepSeek V3, or with a softmax those of V2.

    :raises UnsupportedArchitectureError: the file has another choice of experts
    """
    sizes = model.num_layers, model.tensor("token_embd.weight").shape[0]
    gate = model.integer(_GATE, _NO_GATE, minimum=0) or (_SIGMOID_GATE if sizes in _SIGMOIDS_UNSAID else _SOFTMAX_GATE)
    has_bias = any(name.endswith(".exp_probs_b.bias") for name in model.tensors)
    config = grouped_config(model)
    if has_bias != (gate == _SIGMOID_GATE):
        what = "sigmoids as weights of experts" if gate == _SIGMOID_GATE else "a softmax as weights of experts"
        raise model.unsupported(f"{what} {'with' if has_bias else 'without'} a bias of the choice")
    if gate == _SIGMOID_GATE:
        return {"model_type": "deepseek_v3", **config}
    if config["norm_topk_prob"]:
        raise model.unsupported("normalized weights of experts that are a softmax")
    limited = (
        {"topk_method": "group_limited_greedy", "gguf_group_score_size": _GROUP_SCORE_SIZE}
        if config["n_group"] > 1
        else {}
    )
    return {"model_type": "deepseek_v2", **config, **limited}


def ernie_config(model: GgufModel) -> dict[str, Any]:
    """Return the settings of Ernie 4.5 with experts, whose weights llama.cpp always normalizes."""
    size = model.integer("expert_feed_forward_length")
    shared = model.integer(SHARED_SIZE, model.integer(_SHARED_COUNT, 0, minimum=0) * size, minimum=0)
    if shared % size:
        raise model.unsupported(f"shared experts of {shared} neurons, no multiple of {size}")
    return {
        "use_bias": False,
        "moe_num_experts": model.integer("expert_count"),
        "moe_k": model.integer("expert_used_count"),
        "moe_intermediate_size": size,
        "moe_num_shared_experts": shared // size,
        "moe_layer_start_index": model.integer(_FIRST, 0, minimum=0),
        "moe_layer_interval": model.integer("interleave_moe_layer_step", 1),
    }


def exaone_moe_config(model: GgufModel) -> dict[str, Any]:
    """Return the settings of EXAONE with experts, whose layers without a window have no positions.

    :raises UnsupportedArchitectureError: layers with a window have a base of frequencies of their own
    """
    theta = model.number("rope.freq_base", 10_000.0)
    if (of_windows := model.number("rope.freq_base_swa", theta)) != theta:
        raise model.unsupported(f"metadata {model.architecture}.rope.freq_base_swa = {of_windows}")
    return grouped_config(model, "num_experts", "num_shared_experts") | {
        "sliding_window": model.integer("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if has_window else "full_attention" for has_window in model.windowed(_WINDOW_PERIOD)
        ],
    }


def minimax_config(model: GgufModel) -> dict[str, Any]:
    """Return the settings of MiniMax M2."""
    return {
        "intermediate_size": model.integer("expert_feed_forward_length"),
        "partial_rotary_factor": model.rotary_dim / model.head_dim,
    }


def hunyuan_moe_config(model: GgufModel) -> dict[str, Any]:
    """Return the settings of Hunyuan with experts, whose shared expert is as large as each of the others."""
    size = model.integer("expert_feed_forward_length")
    if (shared := model.integer(SHARED_SIZE, size)) != size:
        raise model.unsupported(f"metadata {model.architecture}.{SHARED_SIZE} = {shared}")
    count = model.integer("expert_count")
    return {
        "attention_bias": False,
        "intermediate_size": size,
        "num_experts": count,
        "moe_topk": model.integer("expert_used_count"),
    }


def routing_metadata(moe: MoeConfig, architecture: str) -> dict[str, Any]:
    """Return the keys of a mixture of experts that not all architectures have.

    :param architecture: GGUF's name of the model's architecture
    """
    values: dict[str, Any] = {}
    if architecture in _SIGMOIDS | _BOTH:
        values[_GATE] = _SIGMOID_GATE if moe.sigmoid_scores else _SOFTMAX_GATE
    if architecture in _WITH_DENSE:
        values[_FIRST] = min(moe.layers)
    if _SHARED_COUNT in routing_keys(architecture):
        shared = moe.shared_intermediate_size or 0
        values[_SHARED_COUNT] = -(-shared // moe.intermediate_size)  # nemotron_h's has a size of its own
    if architecture == "ernie4_5-moe":
        values["interleave_moe_layer_step"] = 1
    if architecture in _GROUPED:
        values |= {_SCALE: float(moe.routed_scale), _NORM: moe.renormalize}
    if moe.num_groups_per_token < moe.num_groups:
        values |= {_GROUPS: moe.num_groups, _GROUPS_USED: moe.num_groups_per_token}
    return values


def missing_in_gguf(config: DecoderConfig, moe: MoeConfig, architecture: str) -> str | None:
    """Return what an architecture has no key for, or None if it has all keys that the mixture needs."""
    is_grouped, first = architecture in _GROUPED, min(moe.layers)
    with_mlp = {layer for layer in range(config.num_layers) if config.has_mlp(layer)}
    lacks = {
        "layers without experts": architecture not in _WITH_DENSE and len(moe.layers) < len(with_mlp),
        "layers without experts after others": moe.layers != {layer for layer in with_mlp if layer >= first},
        "experts without shared ones": is_grouped and moe.shared_intermediate_size is None,
        "experts without a bias of the choice": architecture in _SIGMOIDS and not moe.has_choice_bias,
        "groups of experts by their largest weight": moe.num_groups_per_token < moe.num_groups
        and moe.group_score_size != _GROUP_SCORE_SIZE,
        "a choice without normalized weights": architecture == "lfm2moe" and not moe.renormalize,
        # of lfm2moe, llama.cpp ignores the key
        "scaled weights of experts": not is_grouped and moe.routed_scale != 1.0,
        f"sums of weights of at least {moe.min_sum}": moe.min_sum > _SMALLEST_SUM,
        # of dots1, llama.cpp has neither windows nor biases
        "sliding windows": architecture == "dots1" and any(config.sliding_windows),
        "biases of attention": architecture in ("dots1", "hunyuan-moe") and config.qkv_bias,
    }
    return next((what for what, is_so in lacks.items() if is_so), None)

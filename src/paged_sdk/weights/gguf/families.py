"""Make the configs of GGUF architectures that differ from llama in a few keys, which are read as llama.cpp does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from paged_sdk.errors import shown
from paged_sdk.weights.gguf.granite import granite, granitemoe
from paged_sdk.weights.gguf.latent_attention import latent_config
from paged_sdk.weights.gguf.mamba import falcon_h1, granitehybrid, mamba2, nemotron_h
from paged_sdk.weights.gguf.model import GgufModel
from paged_sdk.weights.gguf.rope import rope_scaling
from paged_sdk.weights.gguf.routing import (
    afmoe_config,
    ernie_config,
    exaone_moe_config,
    grouped_config,
    hunyuan_moe_config,
    minimax_config,
)

__all__ = ["FAMILIES", "biases_of", "delta_config", "norm_eps"]

# The config's field for the epsilon of layer norms, by architecture.
_LAYER_NORM_EPS: Final = MappingProxyType(
    {
        "starcoder2": "norm_epsilon",
        "command-r": "layer_norm_eps",
        "cohere2": "layer_norm_eps",
        "nemotron": "norm_eps",
        "phi2": "layer_norm_eps",
        "stablelm": "layer_norm_eps",
        "falcon": "layer_norm_epsilon",
        "bloom": "layer_norm_epsilon",
        "mpt": "layer_norm_epsilon",
        "bert": "layer_norm_eps",
        "nomic-bert": "layer_norm_eps",
        "modern-bert": "norm_eps",
    }
)
_NORMS: Final = frozenset({"attn_norm", "ffn_norm", "output_norm"})
_QKV: Final = frozenset({"attn_q", "attn_k", "attn_v"})
_MLP: Final = frozenset({"ffn_up", "ffn_down"})
_BERT_NORMS: Final = frozenset({"token_embd_norm", "attn_output_norm", "layer_output_norm"})
_BIASES: Final = MappingProxyType(
    {
        "starcoder2": _NORMS,
        "nemotron": _NORMS,
        "glm4": _QKV,
        "seed_oss": _QKV,
        "phi2": _NORMS | _QKV | _MLP | {"attn_output", "output"},
        "stablelm": _NORMS | _QKV,
        "falcon": _NORMS | {"attn_norm_2"},
        "gpt-oss": _QKV | {"attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"},
        "bloom": _NORMS | _MLP | {"token_embd_norm", "attn_qkv", "attn_output"},
        "glm4moe": _QKV | {"exp_probs_b"},
        **dict.fromkeys(
            ("lfm2moe", "dots1", "ernie4_5-moe", "exaone-moe", "minimax-m2", "deepseek2", "afmoe"),
            frozenset({"exp_probs_b"}),
        ),
        **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), frozenset({"ssm_dt"})),
        **dict.fromkeys(("granitehybrid", "falcon-h1", "mamba2", "nemotron_h"), frozenset({"ssm_dt", "ssm_conv1d"})),
        "nemotron_h_moe": frozenset({"ssm_dt", "ssm_conv1d", "exp_probs_b"}),
        # "output" is cls.output.bias.
        "bert": _BERT_NORMS | _QKV | _MLP | {"attn_qkv", "attn_output", "cls", "output"},
        "nomic-bert": _BERT_NORMS,
        "modern-bert": frozenset({"cls", "output"}),
    }
)
# Every fourth layer has no window (SmolLM3: no positions; Qwen 3.5: attention), unless files record it.
_PERIOD: Final = 4
_EXAONE_WITH_WINDOWS: Final = 64  # layers of EXAONE 4's largest model; smaller ones have no windows


def norm_eps(model: GgufModel) -> dict[str, Any]:
    """Return the epsilon of norms, by the name of the config's field."""
    if (field := _LAYER_NORM_EPS.get(model.architecture)) is not None:
        return {field: model.number("attention.layer_norm_epsilon")}
    return {"rms_norm_eps": model.number("attention.layer_norm_rms_epsilon")}


def biases_of(architecture: str) -> frozenset[str]:
    """Return the stems of the tensors that may have a bias, besides those that the config's bias fields cover."""
    return _BIASES.get(architecture, frozenset())


def _has(model: GgufModel, name: str) -> bool:
    return f"blk.0.{name}" in model.tensors


def _gemma(model: GgufModel) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "attention_bias": False}


def _seed_oss(model: GgufModel) -> dict[str, Any]:
    return {"attention_bias": _has(model, "attn_q.bias"), "attention_out_bias": False, "mlp_bias": False}


def _mistral3(model: GgufModel) -> dict[str, Any]:
    # llama.cpp ignores the file's window.
    return {"sliding_window": None}


def _smollm3(model: GgufModel) -> dict[str, Any]:
    return {"no_rope_layer_interval": _PERIOD, "use_sliding_window": False, "sliding_window": None}


def _arcee(model: GgufModel) -> dict[str, Any]:
    return {"hidden_act": "relu2"}


def _apertus(model: GgufModel) -> dict[str, Any]:
    """Return the settings of Apertus, whose class scales positions unless a config says that it does not."""
    unscaled = {"rope_type": "default", "rope_theta": model.number("rope.freq_base", 10_000.0)}
    return {"hidden_act": "xielu", "rope_parameters": unscaled if rope_scaling(model) is None else None}


def _olmo2(model: GgufModel) -> dict[str, Any]:
    """Return the settings of OLMo 2, or of OLMo 3 if there are windows; its windowed layers rotate without scaling."""
    window = model.integer("attention.sliding_window", 0, minimum=0)
    if window == 0:
        return {"attention_bias": False}
    types = _layer_types(model.num_layers, window)
    pattern = model.metadata.get("olmo2.attention.sliding_window_pattern", _PERIOD)
    if pattern not in (_PERIOD, [each == "sliding_attention" for each in types]):
        raise model.unsupported(f"metadata olmo2.attention.sliding_window_pattern = {shown(pattern)}")
    theta = model.number("rope.freq_base_swa", model.number("rope.freq_base", 10_000.0))
    return {
        "model_type": "olmo3",
        "attention_bias": False,
        "sliding_window": window,
        "layer_types": types,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": theta}},
    }


def _ernie4_5(model: GgufModel) -> dict[str, Any]:
    return {"use_bias": False}


def _exaone4(model: GgufModel) -> dict[str, Any]:
    layers = model.num_layers
    window = model.integer("attention.sliding_window", 4096) if layers == _EXAONE_WITH_WINDOWS else None
    return {"sliding_window": window, "sliding_window_pattern": _PERIOD, "layer_types": _layer_types(layers, window)}


def _glm4(model: GgufModel) -> dict[str, Any]:
    return {
        "partial_rotary_factor": model.rotary_dim / model.head_dim,
        "attention_bias": _has(model, "attn_q.bias"),
    }


def _glm4moe(model: GgufModel) -> dict[str, Any]:
    return grouped_config(model) | _glm4(model) | {"use_qk_norm": _has(model, "attn_q_norm.weight")}


def _dots1(model: GgufModel) -> dict[str, Any]:
    # llama.cpp has no windows in this architecture.
    return grouped_config(model) | {"attention_bias": False, "sliding_window": None}


def _afmoe(model: GgufModel) -> dict[str, Any]:
    """Return the settings of AFMoE: as in llama.cpp, embeddings are scaled, and every fourth layer has no window."""
    window = model.integer("attention.sliding_window")
    return afmoe_config(model) | {
        "mup_enabled": True,
        "attention_bias": False,
        "sliding_window": window,
        "layer_types": _layer_types(model.num_layers, window),
    }


def _hunyuan_dense(model: GgufModel) -> dict[str, Any]:
    return {"attention_bias": False}


def _starcoder2(model: GgufModel) -> dict[str, Any]:
    # All matrices have biases or none. llama.cpp ignores the file's window.
    has_bias = _has(model, "attn_q.bias")
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": has_bias,
        "attention_bias": has_bias,
        "mlp_bias": has_bias,
        "sliding_window": None,
    }


def _command_r(model: GgufModel) -> dict[str, Any]:
    return {
        "logit_scale": model.number("logit_scale", 0.0) or 1.0,
        "use_qk_norm": _has(model, "attn_q_norm.weight"),
        "attention_bias": False,
    }


def _cohere2(model: GgufModel) -> dict[str, Any]:
    window = model.integer("attention.sliding_window")
    return {
        "logit_scale": model.number("logit_scale", 0.0) or 1.0,
        "attention_bias": False,
        "sliding_window": window,
        "layer_types": _layer_types(model.num_layers, window),
    }


def _nemotron(model: GgufModel) -> dict[str, Any]:
    return {
        "hidden_act": "relu2",
        "partial_rotary_factor": model.rotary_dim / model.head_dim,
    }


def _lfm2(model: GgufModel) -> dict[str, Any]:
    """Return the settings of LFM2, whose layers without KV heads have a convolution instead of attention."""
    kinds = ["full_attention" if count else "conv" for count in model.of_layers("attention.head_count_kv")]
    return {
        "norm_eps": model.number("attention.layer_norm_rms_epsilon"),
        "layer_types": kinds,
        "conv_L_cache": model.integer("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2moe(model: GgufModel) -> dict[str, Any]:
    """Return the settings of LFM2 with experts, whose weights llama.cpp always normalizes."""
    return _lfm2(model) | {
        "num_experts": model.integer("expert_count"),
        "moe_intermediate_size": model.integer("expert_feed_forward_length"),
        "num_dense_layers": model.integer("leading_dense_block_count", 0, minimum=0),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in model.tensors),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def delta_config(model: GgufModel) -> dict[str, Any]:
    """Return the settings of gated delta networks beside gated attention. As in llama.cpp, weights of experts are
    normalized.
    """
    num_heads, width = model.integer("ssm.time_step_rank"), model.integer("ssm.inner_size")
    if width % num_heads:
        raise model.malformed(f"its width of {width} is no multiple of {num_heads} value heads")
    config: dict[str, Any] = {
        "layer_types": _delta_layers(model),
        "linear_num_key_heads": model.integer("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": model.integer("ssm.state_size"),
        "linear_value_head_dim": width // num_heads,
        "linear_conv_kernel_dim": model.integer("ssm.conv_kernel"),
        "partial_rotary_factor": model.rotary_dim / model.head_dim,
        "attention_bias": False,
    }
    if num_heads % config["linear_num_key_heads"]:
        raise model.malformed(f"its {num_heads} value heads are no multiple of its key heads")
    if not model.has_experts:
        return config
    return config | {
        "num_experts": model.integer("expert_count"),
        "moe_intermediate_size": model.integer(
            "expert_feed_forward_length",
            model.integer("feed_forward_length", 0, minimum=0) // model.integer("expert_used_count"),
        ),
        "shared_expert_intermediate_size": model.integer(
            "expert_shared_feed_forward_length", model.integer("feed_forward_length", 0, minimum=0)
        ),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _delta_layers(model: GgufModel) -> list[str]:
    """Return the layers' kinds: from a list of those without attention, or the number of layers from one with attention
    to the next.
    """
    key, count = f"{model.architecture}.attention.recurrent_layers", model.num_layers
    interval = model.integer("full_attention_interval", _PERIOD)
    flags = model.metadata.get(key, [(layer + 1) % interval != 0 for layer in range(count)])
    if not isinstance(flags, list) or len(flags) < count or not all(isinstance(flag, bool) for flag in flags):
        raise model.malformed(f"metadata {key} is {shown(flags)}: expected true or false for each of {count} layers")
    return ["linear_attention" if flag else "full_attention" for flag in flags[:count]]


def _olmoe(model: GgufModel) -> dict[str, Any]:
    # For this architecture llama.cpp neither clips queries, keys and values nor normalizes routing weights.
    return {"attention_bias": False, "clip_qkv": None, "norm_topk_prob": False}


def _gpt_oss(model: GgufModel) -> dict[str, Any]:
    """Return the settings of gpt-oss. Files do not record the alternating windows and some parameters of YaRN, which
    are the same in all models. ``truncate`` is False as in the original model, where llama.cpp rounds YaRN's range.
    """
    yarn = {
        "rope_type": "yarn",
        "factor": model.number("rope.scaling.factor", 32.0),
        "original_max_position_embeddings": model.integer("rope.scaling.original_context_length", 4096),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    kinds = ("sliding_attention", "full_attention")
    return {
        "rope_scaling": yarn,
        "intermediate_size": model.integer("expert_feed_forward_length", model.integer("feed_forward_length")),
        "sliding_window": model.integer("attention.sliding_window", 128),
        "layer_types": [kinds[layer % 2] for layer in range(model.num_layers)],
        "attention_bias": True,
    }


def _phi2(model: GgufModel) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "partial_rotary_factor": model.rotary_dim / model.head_dim,
        "qk_layernorm": False,
    }


def _stablelm(model: GgufModel) -> dict[str, Any]:
    return {
        "partial_rotary_factor": model.rotary_dim / model.head_dim,
        # llama.cpp decides by this tensor, and ignores the key use_parallel_residual.
        "use_parallel_residual": not _has(model, "ffn_norm.weight"),
        "use_qkv_bias": _has(model, "attn_q.bias"),
        "qk_layernorm": _has(model, "attn_q_norm.weight"),
    }


def _falcon(model: GgufModel) -> dict[str, Any]:
    _must_share(model)
    num_kv_heads = model.integer("attention.head_count_kv", 1)
    has_two = _has(model, "attn_norm_2.weight")
    return {
        "num_kv_heads": num_kv_heads,
        "ffn_hidden_size": model.integer("feed_forward_length"),
        "activation": "gelu",
        "new_decoder_architecture": num_kv_heads > 1 or has_two,
        "num_ln_in_parallel_attn": 2 if has_two else 1,
        "multi_query": True,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
    }


def _bloom(model: GgufModel) -> dict[str, Any]:
    _must_share(model, expansion=4)
    return {"seq_length": model.integer("context_length")}


def _mpt(model: GgufModel) -> dict[str, Any]:
    _must_share(model, expansion=4)
    largest = model.number("attention.max_alibi_bias", 0.0)
    if largest < 1 or largest != int(largest):
        raise model.unsupported(f"metadata mpt.attention.max_alibi_bias = {largest}")
    clip = model.number("attention.clamp_kqv", 0.0)
    return {"attn_config": {"alibi": True, "alibi_bias_max": int(largest), "clip_qkv": clip or None}}


def _must_share(model: GgufModel, expansion: int | None = None) -> None:
    """Refuse head sizes and MLP widths that do not follow from the hidden size, as configs have no fields for them.

    :param expansion: the MLP's width as a multiple of the hidden size; None: any width
    :raises UnsupportedArchitectureError: a size does not follow from the hidden size
    """
    hidden_size, num_heads = model.integer("embedding_length"), model.integer("attention.head_count")
    if model.head_dim * num_heads != hidden_size:
        raise model.unsupported(f"{num_heads} heads of {model.head_dim} in a hidden size of {hidden_size}")
    if expansion is not None and (width := model.integer("feed_forward_length")) != expansion * hidden_size:
        raise model.unsupported(f"metadata {model.architecture}.feed_forward_length = {width}")


def _layer_types(num_layers: int, window: int | None) -> list[str]:
    """Return the layers' attention types: every fourth is full, the others are windowed (full without a window)."""
    windowed = "full_attention" if window is None else "sliding_attention"
    return [windowed if (layer + 1) % _PERIOD else "full_attention" for layer in range(num_layers)]


FAMILIES: Final[Mapping[str, Callable[[GgufModel], dict[str, Any]]]] = MappingProxyType(
    {
        "gemma": _gemma,
        "granite": granite,
        "granitemoe": granitemoe,
        "seed_oss": _seed_oss,
        "mistral3": _mistral3,
        "smollm3": _smollm3,
        "arcee": _arcee,
        "apertus": _apertus,
        "olmo2": _olmo2,
        "ernie4_5": _ernie4_5,
        "exaone4": _exaone4,
        "exaone-moe": exaone_moe_config,
        "glm4": _glm4,
        "glm4moe": _glm4moe,
        "dots1": _dots1,
        "afmoe": _afmoe,
        "ernie4_5-moe": ernie_config,
        "minimax-m2": minimax_config,
        "hunyuan-dense": _hunyuan_dense,
        "hunyuan-moe": hunyuan_moe_config,
        "starcoder2": _starcoder2,
        "command-r": _command_r,
        "cohere2": _cohere2,
        "nemotron": _nemotron,
        "lfm2": _lfm2,
        "lfm2moe": _lfm2moe,
        "qwen3next": delta_config,
        "granitehybrid": granitehybrid,
        "falcon-h1": falcon_h1,
        "mamba2": mamba2,
        "nemotron_h": nemotron_h,
        "nemotron_h_moe": nemotron_h,
        "olmoe": _olmoe,
        "phi2": _phi2,
        "gpt-oss": _gpt_oss,
        "stablelm": _stablelm,
        "falcon": _falcon,
        "bloom": _bloom,
        "mpt": _mpt,
        "deepseek2": latent_config,
    }
)
"""Functions that make the architecture's own part of a config, by GGUF architecture."""

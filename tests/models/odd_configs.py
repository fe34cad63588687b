"""Draw odd configurations of every family, and build the model that transformers makes of each."""

from __future__ import annotations

import json
import math
import random
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4ForCausalLM, PreTrainedModel

__all__ = ["ABSENT", "FAMILIES", "NEEDED", "draw_config", "reference_of"]

_BUILD: Final[Any] = AutoModelForCausalLM.from_config  # it has no annotations

ABSENT: Final = object()
"""Stands for a field that the config leaves out."""

_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_FULL, _SLIDING = "full_attention", "sliding_attention"
_LAYER_TYPES: Final = [
    [_FULL, _SLIDING, _FULL],
    [_SLIDING, _FULL, _SLIDING],
    [_SLIDING] * 3,
    [_FULL] * 3,
    None,
    [_FULL],
]
_ACTIVATIONS: Final = [
    *("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "gelu_accurate"),
    *("gelu_python_tanh", "relu", "relu2", "relu6", "leaky_relu", "quick_gelu", "sigmoid", "tanh", "mish"),
    *("hardswish", "linear", "gelu_10", "laplace", "no_such", None),
]

_COMMON: Final[dict[str, list[Any]]] = {
    "hidden_size": [48],
    "num_attention_heads": [2, 1],
    "num_key_value_heads": [1, 4, None, ABSENT, 3],
    "head_dim": [16, 4, None, ABSENT],
    "rms_norm_eps": [1e-5, 0.1, ABSENT, ABSENT],
    "tie_word_embeddings": [True, False, ABSENT],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "qkv_bias": [True, False],
    "sliding_window": [4, 8, None, ABSENT],
    "layer_types": _LAYER_TYPES,
    "hidden_act": _ACTIVATIONS,
    "attn_logit_softcapping": [2.0, None],
    "final_logit_softcapping": [1.5, None],
    "query_pre_attn_scalar": [4, 64],
    "max_position_embeddings": [16, 4096, ABSENT],
    "partial_rotary_factor": [0.5, 1.0],
    "attention_dropout": [0.5],
    "use_bidirectional_attention": [False],
    "clip_qkv": [0.1],
    "scale_embeddings": [True],
}

_QWEN_WINDOWS: Final[dict[str, list[Any]]] = {
    "use_sliding_window": [True, True, False],
    "max_window_layers": [0, 1, 2, ABSENT],
}
_MOE: Final[dict[str, list[Any]]] = {
    "num_experts_per_tok": [1, 3],
    "norm_topk_prob": [True, False],
    "decoder_sparse_step": [1, 2],
    "mlp_only_layers": [[1], [0, 2], None],
    "shared_expert_intermediate_size": [24],
    "routed_scaling_factor": [2.0],
}
_QWEN_MOE: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GROUPED: Final[dict[str, Any]] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
_GROUPS: Final[dict[str, list[Any]]] = {
    "n_group": [1, 2, 3, 8],
    "topk_group": [1, 2, 4, 5],
    "first_k_dense_replace": [0, 2, 3],
    "n_shared_experts": [1],
}
_GRANITE: Final[dict[str, Any]] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
_GRANITES: Final[dict[str, list[Any]]] = {
    "logits_scaling": [0.5, ABSENT],
    "residual_multiplier": [1.0, ABSENT],
    "attention_multiplier": [0.5, ABSENT],
}
_GEMMA: Final[dict[str, list[Any]]] = {"hidden_activation": _ACTIVATIONS, "sliding_window_pattern": [2, 3]}

_GEMMA3_IMAGES: Final[dict[str, Any]] = {
    "model_type": "gemma3",
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": 95,
    "boi_token_index": 94,
    "eoi_token_index": 93,
}
_LATENT: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 6,
}
_LATENT_CHOICES: Final[dict[str, list[Any]]] = {
    "num_attention_heads": [4],
    "num_key_value_heads": [4, 4, 4, None, ABSENT, 2],
    "kv_lora_rank": [16, 40],
    "q_lora_rank": [None, None, 16],
    "qk_rope_head_dim": [16, 4],
    "qk_nope_head_dim": [16, 8],
    "v_head_dim": [16, 12],
    "rope_interleave": [True, False],
}
_LINEAR: Final = "linear_attention"
_MAMBA: Final[dict[str, Any]] = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8}
_MAMBA_CHOICES: Final[dict[str, list[Any]]] = {
    "mamba_n_heads": [2, 8, 3],
    "mamba_d_head": ["auto", 16, 8, None],
    "mamba_n_groups": [1, 4, 3, ABSENT],
    "mamba_d_state": [16, 5],
    "mamba_d_conv": [2, 3, ABSENT],
    "mamba_expand": [1, 3, ABSENT],
    "mamba_conv_bias": [False, True],
    "mamba_proj_bias": [True, False],
    "time_step_limit": [[0.0, math.inf], [0.0, 0.5], [0.3, math.inf], None],
}
_HYBRID_TYPES: Final = {
    "layer_types": [[_LINEAR, _FULL, _FULL], ["mamba", "attention", "mamba"], [_FULL] * 3, [_LINEAR] * 3, None]
}
FAMILIES: Final[dict[str, tuple[dict[str, Any], dict[str, list[Any]]]]] = {
    "llama": ({}, {}),
    "mistral": ({"sliding_window": 8}, {}),
    "ministral": ({"sliding_window": 8}, {}),
    "qwen2": ({"sliding_window": 8}, _QWEN_WINDOWS),
    "qwen3": ({"sliding_window": 8}, _QWEN_WINDOWS),
    "phi3": ({}, {"original_max_position_embeddings": [16, 64, ABSENT]}),
    "gemma2": ({"sliding_window": 8, "query_pre_attn_scalar": 8}, _GEMMA),
    "gemma3_text": ({"sliding_window": 8, "query_pre_attn_scalar": 8}, _GEMMA),
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, _MOE),
    "qwen2_moe": (_QWEN_MOE | {"shared_expert_intermediate_size": 40}, _QWEN_WINDOWS | _MOE),
    "qwen3_moe": (_QWEN_MOE, _QWEN_WINDOWS | _MOE),
    "gemma": ({}, {}),
    "granite": (_GRANITE, _GRANITES),
    "seed_oss": ({}, {"attention_out_bias": [True, False]}),
    "arcee": ({}, {}),
    "apertus": ({}, {"hidden_act": ["xielu", *_ACTIVATIONS]}),
    "smollm3": (
        {"no_rope_layer_interval": 2, "sliding_window": 8},
        {"use_sliding_window": [True, False], "no_rope_layers": [[0, 1, 1], [1, 0], None]},
    ),
    "olmo2": ({}, {}),
    "olmo3": ({"sliding_window": 8}, {}),
    "ernie4_5": ({}, {"use_bias": [True, False]}),
    "helium": ({}, {}),
    "exaone4": ({"sliding_window": 8, "sliding_window_pattern": 2}, {"sliding_window_pattern": [3, 1]}),
    "glm": ({}, {"partial_rotary_factor": [0.25, 0.75]}),
    "glm4": ({}, {"partial_rotary_factor": [0.25, 0.75]}),
    "starcoder2": ({}, {"use_bias": [True, False], "norm_epsilon": [0.1, ABSENT]}),
    "phi": ({}, {"qk_layernorm": [True, False], "layer_norm_eps": [0.1, ABSENT]}),
    "stablelm": (
        {"partial_rotary_factor": 0.5},
        {"use_qkv_bias": [True], "qk_layernorm": [True], "use_parallel_residual": [True], "layer_norm_eps": [0.1]},
    ),
    "cohere": ({}, {"use_qk_norm": [True, False], "logit_scale": [2.0, ABSENT], "layer_norm_eps": [0.1, ABSENT]}),
    "cohere2": ({"sliding_window": 8}, {"sliding_window_pattern": [2, 1], "logit_scale": [2.0, ABSENT]}),
    "olmoe": ({"num_experts": 4, "num_experts_per_tok": 2}, _MOE | {"clip_qkv": [0.5, 0.1]}),
    "gpt_oss": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        _MOE | {"swiglu_limit": [0.5, ABSENT], "swiglu_alpha": [1.0]},
    ),
    "phimoe": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.4},
        {"lm_head_bias": [True, False], "router_jitter_noise": [ABSENT, 0.1], "num_experts_per_tok": [1, 3]},
    ),
    "glm4_moe": (_GROUPED, _MOE | _GROUPS | {"use_qk_norm": [True, False], "partial_rotary_factor": [0.25, 1.0]}),
    "dots1": (_GROUPED | {"sliding_window": 8}, _MOE | _GROUPS | {"max_window_layers": [0, 1, ABSENT]}),
    "exaone_moe": (
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "num_shared_experts": 2,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
        },
        _MOE
        | _GROUPS
        | {
            "sliding_window_pattern": [3, 1],
            "mlp_layer_types": [["sparse", "dense", "sparse"], ["sparse"], None],
            "num_shared_experts": [1],
        },
    ),
    "afmoe": (
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "num_shared_experts": 2,
            "sliding_window": 8,
            "global_attn_every_n_layers": 2,
        },
        _MOE
        | _GROUPS
        | {
            "global_attn_every_n_layers": [3, 1],
            "num_dense_layers": [0, 2, 3],
            "num_shared_experts": [1],
            "route_scale": [2.0, 0.5],
            "mup_enabled": [True],
            "score_func": ["sigmoid", "softmax"],
            "route_norm": [True, False],
        },
    ),
    "minimax_m2": (
        {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 4},
        _MOE | {"rotary_dim": [2, 8, 3, ABSENT], "scoring_func": ["sigmoid"]},
    ),
    "ernie4_5_moe": (
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 16, "moe_num_shared_experts": 2},
        {
            "moe_layer_start_index": [0, 2, 3],
            "moe_layer_end_index": [1, 0, 7],
            "moe_layer_interval": [2, 1],
            "moe_norm_min": [0.3],
            "moe_num_shared_experts": [0, 1],
            "use_bias": [True, False],
        },
    ),
    "granitemoe": (_GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}, _MOE | _GRANITES),
    "granitemoeshared": (
        _GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
        _MOE | _GRANITES | {"shared_intermediate_size": [0, 40]},
    ),
    "hunyuan_v1_dense": ({}, {}),
    "hunyuan_v1_moe": ({"num_experts": 4, "moe_topk": 2}, {"moe_topk": [1, [2, 2, 2], [1, 2, 2]]}),
    "ministral3": ({}, {}),
    "gptj": (
        {"rotary_dim": 4, "n_inner": 48},
        {"rotary_dim": [2, 8, 3, 16], "n_inner": [40, None, ABSENT], "activation_function": _ACTIVATIONS},
    ),
    "codegen": (
        {"rotary_dim": 4, "n_inner": 48},
        {"rotary_dim": [2, 8, 3, 16], "n_inner": [40, None, ABSENT], "activation_function": _ACTIVATIONS},
    ),
    "falcon": (
        {"head_dim": ABSENT},  # which its class of configurations computes
        {
            "head_dim": [ABSENT],
            "alibi": [True],
            "new_decoder_architecture": [True],
            "num_kv_heads": [1, 2, 4, None, 3],
            "num_ln_in_parallel_attn": [1, 2, None],
            "multi_query": [False],
            "parallel_attn": [False],
            "bias": [True],
            "ffn_hidden_size": [40],
            "activation": _ACTIVATIONS,
        },
    ),
    "bloom": ({}, {"apply_residual_connection_post_layernorm": [True, False], "layer_norm_epsilon": [0.1, ABSENT]}),
    "mpt": (
        {"max_seq_len": 64},
        {
            # Not alibi_bias_max, which transformers takes for 8 whatever it is: llama.cpp judges it, in another test.
            "attn_config": [
                *({"alibi": False}, {"clip_qkv": 0.5}, {"softmax_scale": 0.2}, {}),
                *({"qk_ln": True}, {"prefix_lm": True}, {"attn_type": "multiquery_attention"}),
            ],
            "no_bias": [True, False],
            "logit_scale": [2.0, None],
            "expansion_ratio": [2],
            "norm_type": ["rmsnorm"],
        },
    ),
    "nemotron": ({}, {"partial_rotary_factor": [0.25], "norm_eps": [0.1, ABSENT]}),
    "youtu": (_LATENT, _LATENT_CHOICES),
    "minicpm3": (
        _LATENT,
        _LATENT_CHOICES
        | {
            "v_head_dim": [16, 12, None, ABSENT],
            "scale_emb": [2.5, 1],
            "scale_depth": [0.7, None, ABSENT],
            "dim_model_base": [16, None, ABSENT],
            "attention_bias": [True],
            "mlp_bias": [True],
        },
    ),
    "mistral4": (
        _LATENT | _GROUPED | {"head_dim": ABSENT},
        _MOE | _GROUPS | _LATENT_CHOICES | {"head_dim": [ABSENT]},
    ),
    "deepseek_v2": (
        _LATENT | _GROUPED,
        _MOE | _GROUPS | _LATENT_CHOICES | {"topk_method": ["group_limited_greedy", "greedy", "noaux_tc"]},
    ),
    "deepseek_v3": (_LATENT | _GROUPED, _MOE | _GROUPS | _LATENT_CHOICES),
    "glm4_moe_lite": (
        _LATENT | _GROUPED,
        _MOE | _GROUPS | _LATENT_CHOICES | {"mlp_layer_types": [["sparse", "dense", "sparse"], ["dense"] * 3, None]},
    ),
    "granitemoehybrid": (
        _GRANITE
        | _MAMBA
        | {
            "layer_types": [_LINEAR, _FULL, _LINEAR],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
        _GRANITES
        | _MAMBA_CHOICES
        | _HYBRID_TYPES
        | {
            "num_local_experts": [0, 0, 0, ABSENT],
            "num_experts_per_tok": [0, 1, 3, ABSENT],
            "shared_intermediate_size": [0, 40],
            "position_embedding_type": ["rope", "rope", "nope", None],
        },
    ),
    "bamba": (
        _MAMBA | {"attn_layer_indices": [1]},
        _MAMBA_CHOICES | {"attn_layer_indices": [[0, 2], [0, 1, 2], [5], []]},
    ),
    "falcon_h1": (
        _MAMBA | {"mamba_d_ssm": 64},
        _MAMBA_CHOICES
        | {
            "mamba_d_ssm": [32, None, ABSENT],
            "mamba_rms_norm": [True, True, False],
            "mamba_norm_before_gate": [False, True],
            "projectors_bias": [True, False],
            "attention_in_multiplier": [1.5],
            "attention_out_multiplier": [0.6, 1.0],
            "key_multiplier": [0.4],
            "mlp_multipliers": [[0.8, 1.3], None, [1.0]],
            "ssm_multipliers": [[0.9, 1.2, 0.8, 1.1, 0.7], [1.0] * 5, [1.0] * 4, None],
            "ssm_in_multiplier": [1.3],
            "ssm_out_multiplier": [0.7],
            "embedding_multiplier": [3.0],
            "lm_head_multiplier": [0.3],
        },
    ),
    "nemotron_h": (
        {
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "layers_block_type": [_LINEAR, _FULL, "mlp", _LINEAR],
            "time_step_min": 1e-30,  # transformers' least step, of prompts alone
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 40,
        },
        {
            "layers_block_type": [
                ["mamba", "attention", "mlp"],
                [_FULL, "mlp"],
                [_LINEAR, "moe", _FULL],
                *([["moe", _FULL, "moe", "mlp"]] * 3),
                ["mlp"],
                ABSENT,
            ],
            "hybrid_override_pattern": ["M*-M", "*-", "ME*", "M|*"],
            "n_routed_experts": [6, ABSENT],
            "num_experts_per_tok": [1, 9],
            "moe_intermediate_size": [20],
            "moe_shared_expert_intermediate_size": [24, ABSENT],
            "moe_latent_size": [16, None],
            "mlp_bias": [True],
            "norm_topk_prob": [False],
            "routed_scaling_factor": [2.0],
            **{key: _GROUPS[key] for key in ("n_group", "topk_group")},
            "mlp_hidden_act": _ACTIVATIONS,
            "mamba_hidden_act": ["gelu", "silu"],
            "mamba_num_heads": [2, 6, 3],
            "mamba_head_dim": [8, 12],
            "n_groups": [1, 4, ABSENT],
            "ssm_state_size": [5, ABSENT],
            "conv_kernel": [2, 3, ABSENT],
            "use_conv_bias": [False],
            "use_bias": [True],
            "layer_norm_epsilon": [0.1, ABSENT],
            "time_step_limit": _MAMBA_CHOICES["time_step_limit"],
            **{key: _MAMBA_CHOICES[key] for key in ("mamba_n_groups", "mamba_d_conv", "mamba_conv_bias")},
        },
    ),
    "mamba2": (
        {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8},
        {
            "layer_types": [ABSENT],  # which its class can only be asked for
            "num_heads": [2, 8, 3],
            "head_dim": [8, 32],
            "expand": [1, 4, ABSENT],
            "n_groups": [1, 4, 3, ABSENT],
            "state_size": [5, ABSENT],
            "conv_kernel": [2, 3, ABSENT],
            "hidden_act": ["gelu", "silu"],
            "use_conv_bias": [False],
            "use_bias": [True],
            "residual_in_fp32": [False, ABSENT],
            "layer_norm_epsilon": [0.1, ABSENT],
            "time_step_limit": _MAMBA_CHOICES["time_step_limit"],
        },
    ),
}
"""By ``model_type``: what every config of the family has, and what it may have beside :data:`_COMMON`."""

_GEMMA4_ASSISTANT: Final = {
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    },
    "backbone_hidden_size": 1536,
}
NEEDED: Final[dict[str, dict[str, Any]]] = {
    "gemma3": {"text_config": {"model_type": "gemma3_text"}},
    "gemma4_assistant": _GEMMA4_ASSISTANT,
    "gemma4_unified_assistant": _GEMMA4_ASSISTANT,
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "bamba": {"attn_layer_indices": [3]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
}
"""By ``model_type``: what configs must state, since transformers' class has no default, one without a model, or one
that is refused: without attention.
"""


def draw_config(model_type: str, seed: int) -> dict[str, Any]:
    """Draw the content of a config.json; most of its fields are usual, a few are odd.

    :param model_type: one of :data:`FAMILIES`, or gemma3
    """
    draw = random.Random(f"{model_type} {seed}")
    if model_type == "gemma3":
        config = dict(_GEMMA3_IMAGES, text_config=draw_config("gemma3_text", seed))
        return config | draw.choice([{}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True}])
    own, choices = FAMILIES[model_type]
    config = {"model_type": model_type, **_SHAPE, **own}
    choices = _COMMON | choices
    for key in draw.sample(sorted(choices), draw.randint(1, 5)):
        config[key] = draw.choice(choices[key])
    if model_type == "mamba2":  # which has no positions
        if draw.random() < 0.9:  # its class refuses heads of other sizes
            expand = 2 if config.get("expand", ABSENT) is ABSENT else config["expand"]
            config["head_dim"] = expand * config["hidden_size"] // config["num_heads"]
    elif draw.random() < 0.7:
        config |= _draw_rope(draw, model_type, config)
    return {key: value for key, value in config.items() if value is not ABSENT}


def _draw_rope(draw: random.Random, model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    """Draw settings of the rotary embedding, in one of the forms that configs have them in."""
    theta = draw.choice([100.0, 10_000, 500_000.0])
    heads = config["num_attention_heads"]
    head_dim = config["head_dim"] if isinstance(config.get("head_dim"), int) else config["hidden_size"] // heads
    count = int(head_dim * config.get("partial_rotary_factor", 1.0)) // 2
    kinds: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 4.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"factor": draw.choice([4.0, 0.5, 1.0])},
        "longrope": {
            "short_factor": [1.0 + 0.1 * i for i in range(count)],
            "long_factor": [1.0 + i for i in range(count)],
        },
        "proportional": {},
    }
    of_family = {
        "phi3": ["default", "longrope", "longrope", "su"],
        "mistral4": ["yarn", "llama3"],  # others count whole heads, which its class cannot compute
    }
    kind = draw.choice(of_family.get(model_type, [*kinds, "yarn", "longrope"]))
    scaling: dict[str, Any] = {draw.choice(["rope_type", "type"]): kind, **kinds["longrope" if kind == "su" else kind]}
    odd: dict[str, list[Any]] = {
        "original_max_position_embeddings": [16, 64],
        "attention_factor": [1.3],
        "attn_factor": [1.7],
        "beta_fast": [16.0, 4],
        "beta_slow": [2.0],
        "truncate": [False],
        "mscale": [0.7],
        "mscale_all_dim": [0.4],
        "partial_rotary_factor": [0.5],
        "rope_theta": [50.0],
        "factor": [3.0],
    }
    if model_type == "phimoe":
        scaling |= {"short_mscale": 1.2, "long_mscale": draw.choice([1.2, 1.2, 1.4])}
    grows = model_type in ("ministral3", "mistral4")
    if grows:  # whose class cannot do without, whatever the type
        scaling |= {"llama_4_scaling_beta": draw.choice([0.1, 0.5])}
    if kind in ("llama3", "yarn", "longrope", "su") or grows:
        scaling["original_max_position_embeddings"] = draw.choice([16, 64])
    for key in draw.sample(sorted(odd), draw.choice([0, 0, 1, 3])):
        scaling[key] = draw.choice(odd[key])
    form = draw.random()
    if form < 0.2:
        return {"rope_theta": theta}
    if form < 0.6 and model_type != "mistral4":  # whose class then rotates whole heads
        return {"rope_theta": theta, "rope_scaling": scaling}
    if model_type in ("gemma3_text", "olmo3"):
        local = {"rope_type": "default", "rope_theta": 100.0}
        forms: list[dict[str, Any]] = [scaling, {_FULL: scaling, _SLIDING: local}, {_FULL: scaling}]
        return {"rope_parameters": draw.choice(forms)}
    return {"rope_parameters": {"rope_theta": theta, **scaling}}


def reference_of(config: dict[str, Any], directory: Path) -> PreTrainedModel:
    """Build the model of a config.json with random weights, as transformers reads the file."""
    config = {key: value for key, value in config.items() if value is not ABSENT}
    (directory / "config.json").write_text(json.dumps(config))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = AutoConfig.from_pretrained(directory)
        torch.manual_seed(0)
        # Falcon's eager attention adds ALiBi twice, and what transformers takes by itself adds it once.
        attention = "sdpa" if config["model_type"] == "falcon" else "eager"
        # AutoModelForCausalLM does not know this one, which released models have beside an image encoder.
        build: Any = Mistral4ForCausalLM._from_config if config["model_type"] == "mistral4" else _BUILD
        model: Any = build(read, attn_implementation=attention)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
            if name.endswith(("q_norm.weight", "query_layernorm.weight")):
                parameter.data.add_(2)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # ones, otherwise
                buffer.uniform_(0.7, 1.3)
        for name, tensor in model.state_dict().items():
            if name.endswith(("correction_bias", "expert_bias", "router.gate.weight")):  # zeros, which choose no other
                tensor.copy_(torch.randn_like(tensor) * 0.2)
    built: PreTrainedModel = model.float().eval()
    return built

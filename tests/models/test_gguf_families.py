"""GGUF files of families that differ from llama in a few keys are the models that they were made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import gguf
import numpy as np
import pytest
import torch
from attrs import evolve
from odd_configs import ABSENT, reference_of
from reference_decoding import CPU, logits, paged, random_prompt
from safetensors.torch import load_file, save_file
from shared_configs import GROUPED, MULTIPLIERS
from transformers import AutoModelForCausalLM

import tiny
from native_weights import needs_library, workspace
from paged_sdk import write_safetensors
from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.models.family import read_config
from paged_sdk.models.loading import load_model
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.weights import write_gguf
from paged_sdk.weights.gguf.layer_numbers import number_weights
from paged_sdk.weights.gguf.names import ARCHITECTURES
from paged_sdk.weights.gguf.source import GgufSource
from tiny_vision import VISION_FAMILIES, make_vision_checkpoint

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": tiny.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
}
_TIED: Final = {"tie_word_embeddings": True}
#: Of families whose heads share the hidden size and have keys of their own.
_WIDE: Final = {"intermediate_size": 256, "num_key_value_heads": 4, "head_dim": ABSENT}
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_EXPERT_KEYS: Final = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_GROUPED_KEYS: Final = {
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
}
_SHARED: Final = {"shared_expert_intermediate_size": 48}
_SHARED_KEYS: Final = {"expert_shared_feed_forward_length": 48}
_DELTA: Final = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_DELTA_KEYS: Final = {
    "rope.dimension_count": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 192,
}
_GEMMA4: Final[dict[str, Any]] = {
    "model_type": "gemma4_text",
    "global_head_dim": 32,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    "sliding_window": 16,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": tiny.VOCAB_SIZE,
}
_GEMMA4_KEYS: Final[dict[str, float]] = {
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": 16,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
    "rope.freq_base": 1_000_000.0,
    "rope.freq_base_swa": 10_000.0,
    "final_logit_softcapping": 30.0,
}
_MAMBA: Final = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 32}
_MAMBA_KEYS: Final = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
}
_MAMBA2: Final[dict[str, Any]] = {
    "model_type": "mamba2",
    "num_heads": 4,
    "head_dim": 32,
    "n_groups": 2,
    "state_size": 32,
    "layer_norm_epsilon": 1e-5,
}
_NEMOTRON: Final[dict[str, Any]] = {
    "model_type": "nemotron_h",
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 32,
    "time_step_min": 1e-30,  # transformers' least step, of prompts alone
}
_UNGATED: Final[dict[str, Any]] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
    "intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}
_UNGATED_KEYS: Final[dict[str, Any]] = {
    "attention.head_count_kv": [0, 0, 2, 0, 0],
    "feed_forward_length": [0, 32, 0, 0, 32],
    **_EXPERT_KEYS,
    **_SHARED_KEYS,
    "expert_shared_count": 1,
    "expert_group_count": 1,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
}
_GRANITE: Final = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
_GRANITE_KEYS: Final = {
    "embedding_scale": 3.0,
    "residual_scale": 0.4,
    "attention.scale": 0.2,
    "logit_scale": 4.0,
}
_LATENT: Final = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "rms_norm_eps": 1e-6,
}
_LATENT_KEYS: Final = {
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 24,
    "attention.kv_lora_rank": 32,
    "attention.q_lora_rank": 24,
    "rope.dimension_count": 16,
    "leading_dense_block_count": 4,
    "expert_feed_forward_length": 96,
    "expert_shared_count": 0,
}
_OLDER_LATENT_KEYS: Final = {key: value for key, value in _LATENT_KEYS.items() if not key.endswith("_mla")} | {
    "attention.head_count_kv": 4,
    "attention.value_length": 24,
}
_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "llama_4_scaling_beta": 0.4,
}
_KINDS: Final = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
# By GGUF's architecture: the config that makes the model, and the keys that only this architecture has.
FAMILIES: Final[dict[str, tuple[dict[str, Any], Mapping[str, float | str | list[int] | list[bool] | None]]]] = {
    "gemma": ({"model_type": "gemma", **_TIED}, {}),
    "granite": (
        {"model_type": "granite", **_GRANITE},
        _GRANITE_KEYS,
    ),
    "granitemoe": (
        {"model_type": "granitemoe", **_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
        {**_GRANITE_KEYS, "expert_count": 4, "expert_used_count": 2},
    ),
    "granitemoe with a shared expert": (
        {
            "model_type": "granitemoeshared",
            **_GRANITE,
            **_TIED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
        },
        {**_GRANITE_KEYS, **_SHARED_KEYS, "expert_count": 4, "expert_used_count": 2},
    ),
    "mistral3": (
        {
            "model_type": "ministral3",
            "rope_parameters": _YARN,
        },
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.yarn_log_multiplier": 0.5,
            "attention.temperature_scale": 0.4,
        },
    ),
    "seed_oss": ({"model_type": "seed_oss"}, {}),
    "smollm3": ({"model_type": "smollm3"}, {}),
    "arcee": ({"model_type": "arcee"}, {}),
    "apertus": (
        {"model_type": "apertus", "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {},
    ),
    "olmo2": ({"model_type": "olmo2"}, {}),
    "olmo2 with windows": (
        {"model_type": "olmo3", "sliding_window": 16, "rope_theta": 500_000.0},
        {"attention.sliding_window": 16, "rope.freq_base": 500_000.0},
    ),
    "ernie4_5": ({"model_type": "ernie4_5", **_TIED}, {}),
    "exaone4": ({"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 4}, {}),
    "glm4": ({"model_type": "glm4"}, {"rope.dimension_count": 8}),
    "glm4moe": (
        {"model_type": "glm4_moe", **GROUPED, "use_qk_norm": True, "attention_bias": True},
        {**_GROUPED_KEYS, "rope.dimension_count": 8},
    ),
    "dots1": ({"model_type": "dots1", **GROUPED, "norm_topk_prob": True, "sliding_window": None}, _GROUPED_KEYS),
    "dots1 without norms": (
        {
            "model_type": "dots1",
            **GROUPED,
            "norm_topk_prob": False,
            "sliding_window": None,
            "n_group": 1,
            "topk_group": 1,
        },
        {**_GROUPED_KEYS, "expert_group_count": None, "expert_group_used_count": None, "expert_weights_norm": False},
    ),
    "ernie4_5-moe": (
        {
            "model_type": "ernie4_5_moe",
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
        },
        {
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 64,
            "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "exaone-moe": (
        {
            "model_type": "exaone_moe",
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "sliding_window": 16,
        },
        {**_GROUPED_KEYS, "attention.sliding_window": 16, "attention.sliding_window_pattern": [True] * 3 + [False]},
    ),
    "afmoe": (
        {
            "model_type": "afmoe",
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "route_scale": 1.5,
            "sliding_window": 16,
            "mup_enabled": True,
        },
        {
            **{key: value for key, value in _GROUPED_KEYS.items() if "group" not in key and "gating" not in key},
            "attention.sliding_window": 16,
        },
    ),
    "minimax-m2": (
        {"model_type": "minimax_m2", "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
        {
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_feed_forward_length": 96,
            "expert_gating_func": 2,
            "rope.dimension_count": 8,
        },
    ),
    "hunyuan-dense": ({"model_type": "hunyuan_v1_dense", **_TIED}, {}),
    "hunyuan-moe": (
        {"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": 3},
        {
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_feed_forward_length": 96,
            "expert_shared_feed_forward_length": 96,
        },
    ),
    "starcoder2": ({"model_type": "starcoder2", **_TIED}, {"attention.sliding_window": 8}),
    "command-r": ({"model_type": "cohere", "use_qk_norm": True, "logit_scale": 0.5, **_TIED}, {"logit_scale": 0.5}),
    "cohere2": (
        {"model_type": "cohere2", "sliding_window": 16, "logit_scale": 0.5, **_TIED},
        {"attention.sliding_window": 16, "logit_scale": 0.5},
    ),
    "lfm2": (
        {
            "model_type": "lfm2",
            **_TIED,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
        {"attention.head_count_kv": [0, 0, 2, 0], "shortconv.l_cache": 3},
    ),
    "lfm2moe": (
        {
            "model_type": "lfm2_moe",
            **_TIED,
            **_EXPERTS,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_dense_layers": 1,
        },
        {
            "attention.head_count_kv": [0, 2, 0, 2],
            "shortconv.l_cache": 3,
            **_EXPERT_KEYS,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
    ),
    "qwen3next": (
        {"model_type": "qwen3_next", **_DELTA, **_EXPERTS, **_SHARED, "mlp_only_layers": []},
        {**_DELTA_KEYS, **_EXPERT_KEYS, **_SHARED_KEYS, "full_attention_interval": 4},
    ),
    "qwen35": (
        {"model_type": "qwen3_5_text", **_DELTA, **_TIED},
        {**_DELTA_KEYS, "rope.dimension_sections": [1, 1, 0, 0]},
    ),
    "qwen35moe": (
        {"model_type": "qwen3_5_moe_text", **_DELTA, **_EXPERTS, **_SHARED},
        {**_DELTA_KEYS, **_EXPERT_KEYS, **_SHARED_KEYS, "rope.dimension_sections": [1, 1, 0, 0]},
    ),
    "qwen35 with layers in no order": (
        {"model_type": "qwen3_5_text", **_DELTA, "layer_types": _KINDS},
        {
            **_DELTA_KEYS,
            "rope.dimension_sections": [1, 1, 0, 0],
            "attention.recurrent_layers": [kind == "linear_attention" for kind in _KINDS],
        },
    ),
    "granitehybrid": (
        {
            "model_type": "granitemoehybrid",
            **_TIED,
            **_MAMBA,
            "layer_types": _KINDS,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "nope",
            **_GRANITE,
        },
        {
            **_MAMBA_KEYS,
            **_GRANITE_KEYS,
            "attention.head_count_kv": [2 if kind == "full_attention" else 0 for kind in _KINDS],
            "rope.scaling.finetuned": False,
        },
    ),
    "granitehybrid with experts": (
        {
            "model_type": "granitemoehybrid",
            **_TIED,
            **_MAMBA,
            "layer_types": _KINDS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "shared_intermediate_size": 48,
            "position_embedding_type": "rope",
            **_GRANITE,
        },
        {
            **_MAMBA_KEYS,
            **_GRANITE_KEYS,
            "attention.head_count_kv": [2 if kind == "full_attention" else 0 for kind in _KINDS],
            "expert_count": 4,
            "expert_used_count": 2,
            **_SHARED_KEYS,
        },
    ),
    "falcon-h1": (
        {"model_type": "falcon_h1", **_MAMBA, "mamba_d_ssm": 128},
        _MAMBA_KEYS,
    ),
    "falcon-h1 with norms": (
        {
            "model_type": "falcon_h1",
            **_MAMBA,
            "mamba_d_ssm": 128,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
        _MAMBA_KEYS,
    ),
    "mamba2": (
        _MAMBA2,
        {
            **_MAMBA_KEYS,
            **dict.fromkeys(("feed_forward_length", "attention.head_count"), 0),
            **dict.fromkeys(("attention.head_count_kv", "attention.key_length", "attention.value_length")),
        },
    ),
    "nemotron_h": (
        {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        },
        {
            **_MAMBA_KEYS,
            "attention.head_count_kv": [0, 0, 2, 0, 0],
            "feed_forward_length": [0, 96, 0, 0, 96],
        },
    ),
    "nemotron_h_moe": (
        {**_NEMOTRON, **_UNGATED, "n_group": 2},
        {
            **_MAMBA_KEYS,
            **_UNGATED_KEYS,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
        },
    ),
    "nemotron_h_moe with latent vectors": (
        {**_NEMOTRON, **_UNGATED, "moe_latent_size": 32},
        {**_MAMBA_KEYS, **_UNGATED_KEYS, "moe_latent_size": 32},
    ),
    "nemotron": ({"model_type": "nemotron"}, {"rope.dimension_count": 8}),
    "deepseek2": ({"model_type": "deepseek_v3", **_LATENT, **GROUPED}, {**_LATENT_KEYS, **_GROUPED_KEYS}),
    "deepseek2 with a softmax": (
        {"model_type": "deepseek_v2", **_LATENT, **GROUPED, "n_group": 1, "topk_group": 1},
        {
            **_LATENT_KEYS,
            **_GROUPED_KEYS,
            **dict.fromkeys(("expert_group_count", "expert_group_used_count", "expert_gating_func")),
            "expert_weights_norm": False,
        },
    ),
    "deepseek2 without experts": ({"model_type": "youtu", **_LATENT}, _LATENT_KEYS),
    "deepseek2 in older files": ({"model_type": "youtu", **_LATENT}, _OLDER_LATENT_KEYS),
    "olmoe": (
        {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "phi2": ({"model_type": "phi", "partial_rotary_factor": 0.5}, {"rope.dimension_count": 8}),
    "stablelm": (
        {"model_type": "stablelm", "partial_rotary_factor": 0.25, "use_qkv_bias": True},
        {"rope.dimension_count": 4},
    ),
    "stablelm with norms of heads": (
        {"model_type": "stablelm", "partial_rotary_factor": 0.5, "qk_layernorm": True, "use_parallel_residual": True},
        {"rope.dimension_count": 8},
    ),
    "falcon": (
        {"model_type": "falcon", **_TIED, **_WIDE, "multi_query": True},
        {"attention.head_count_kv": 1},
    ),
    "bloom": ({"model_type": "bloom", **_TIED, **_WIDE, "seq_length": 512}, {}),
    "falcon with two norms": (
        {"model_type": "falcon", **_TIED, **_WIDE, "new_decoder_architecture": True, "num_kv_heads": 2},
        {"attention.head_count_kv": 2},
    ),
    "gemma4": (
        _GEMMA4
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
        },
        {
            **_GEMMA4_KEYS,
            "feed_forward_length": [96, 96, 96, 96, 192, 192],
            "attention.sliding_window_pattern": [True, False] * 3,
            "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 32,
        },
    ),
    "gemma4 with experts": (
        _GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        {
            **_GEMMA4_KEYS,
            **_EXPERT_KEYS,
            "attention.head_count_kv": [2, 2, 2, 1],
            "attention.sliding_window_pattern": [True, True, True, False],
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
        },
    ),
    "mpt": (
        {
            "model_type": "mpt",
            **_TIED,
            **_WIDE,
            "max_seq_len": 512,
            "attn_config": {"alibi": True, "clip_qkv": 3.0},
        },
        {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 3.0},
    ),
}
_GEMMA4_SCALES: Final = MappingProxyType(
    {
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
    }
)
"""Tensors for which the gguf package has no whole name."""
_PERMUTED: Final = (
    *("granite", "granitemoe", "mistral3", "smollm3", "arcee"),
    *("granitehybrid", "nemotron_h", "nemotron_h_moe"),
)
_OTHERS: Final = MappingProxyType({"gemma4": {"rope_freqs.weight": torch.tensor([1.0] * 4 + [1e30] * 12)}})
_NORMS_LESS_1: Final = ("gemma", "nemotron", "qwen3next", "qwen35", "qwen35moe")


def delta_tensors(name: str, tensor: torch.Tensor, architecture: str) -> dict[str, torch.Tensor]:
    """Return what the converter makes of a tensor of a gated delta network, by GGUF name."""
    layer, own = f"blk.{name.split('.')[2]}", name.split(".linear_attn.")[1].removesuffix(".weight")
    key_heads, each, size = 2, 3, 32
    keys = 2 * key_heads * size
    if own == "in_proj_qkvz":
        groups = tensor.view(key_heads, -1, tensor.shape[1])
        query, key, value, gate = (part.flatten(0, 1) for part in torch.split(groups, [size, size, 96, 96], 1))
        return {
            f"{layer}.attn_qkv.weight": torch.cat([query, key, value]),
            f"{layer}.attn_gate.weight": gate,
        }

    def tiled(values: torch.Tensor, width: int) -> torch.Tensor:
        if architecture == "qwen3next":
            return values
        return values.view(key_heads, each, width, *values.shape[1:]).transpose(0, 1).reshape(values.shape)

    match own:
        case "in_proj_ba":
            return {f"{layer}.ssm_ba.weight": tensor}
        case "in_proj_qkv":
            return {f"{layer}.attn_qkv.weight": torch.cat([tensor[:keys], tiled(tensor[keys:], size)])}
        case "conv1d":
            values = tensor[:, 0]
            return {f"{layer}.ssm_conv1d.weight": torch.cat([values[:keys], tiled(values[keys:], size)])}
        case "in_proj_z":
            return {f"{layer}.attn_gate.weight": tiled(tensor, size)}
        case "in_proj_a":
            return {f"{layer}.ssm_alpha.weight": tiled(tensor, 1)}
        case "in_proj_b":
            return {f"{layer}.ssm_beta.weight": tiled(tensor, 1)}
        case "A_log":
            return {f"{layer}.ssm_a": tiled(-tensor.exp(), 1)}
        case "dt_bias":
            return {f"{layer}.ssm_dt.bias": tiled(tensor, 1)}
        case "out_proj":
            return {f"{layer}.ssm_out.weight": tiled(tensor.T, size).T}
    assert own == "norm"
    return {f"{layer}.ssm_norm.weight": tensor}


def mamba_tensors(name: str, tensor: torch.Tensor, groups: int) -> dict[str, torch.Tensor]:
    """Return what the converter makes of a tensor of a Mamba-2 layer, by GGUF name; none of others."""
    prefix = "mamba." if ".mamba." in name else "mixer."
    if prefix not in name:
        return {}
    layer, own = f"blk.{name.split('.')[2]}", name.partition(prefix)[2]
    if own.startswith(("in_proj.", "out_proj.")):
        return {f"{layer}.ssm_{own.replace('_proj', '')}": tensor}
    match own:
        case "conv1d.weight":
            return {f"{layer}.ssm_conv1d.weight": tensor[:, 0]}
        case "conv1d.bias":
            return {f"{layer}.ssm_conv1d.bias": tensor}
        case "A_log":
            return {f"{layer}.ssm_a": -tensor.exp()[:, None]}
        case "D":
            return {f"{layer}.ssm_d": tensor[:, None]}
        case "dt_bias":
            return {f"{layer}.ssm_dt.bias": tensor}
        case "norm.weight":
            return {f"{layer}.ssm_norm.weight": tensor.view(groups, -1)}
    return {}


def write(
    architecture: str,
    reference: Any,
    own: Mapping[str, float | str | list[int] | list[bool] | None],
    path: Path,
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
    *,
    joins_experts: bool = False,
) -> None:
    """Write a model as llama.cpp's converter does.

    :param architecture: GGUF's name of it, and after a space what tells it from others of that name
    :param own: keys that only this architecture has, or has with another value; None: it lacks the key
    :param others: more tensors, by GGUF name
    :param joins_experts: whether gates and ups of experts are in one tensor, as its option ``--fuse-gate-up-exps`` says
    """
    architecture = architecture.partition(" ")[0]
    config, writer = reference.config, gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "context_length": config.max_position_embeddings,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.to_dict().get("num_key_value_heads", config.num_attention_heads),
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
        "rope.dimension_count": 16,
        **own,
    }
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(f"{architecture}.{key}", value)
            continue
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
            continue
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
            continue
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    number = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    heads_of: dict[str, list[torch.Tensor]] = {}
    numbers: dict[str, list[float]] = {}
    for name, tensor in reference.state_dict().items():
        if ".act_fn." in name:
            numbers.setdefault(f"xielu.{name.rpartition('.')[2]}", []).append(tensor.item())
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own_stem = next((own for own in _GEMMA4_SCALES if name.endswith(f".{own}")), None)
        if architecture == "gemma4" and own_stem is not None:
            writer.add_tensor(f"blk.{name.split('.')[2]}.{_GEMMA4_SCALES[own_stem]}", tensor.contiguous().numpy())
            continue
        block, _, projection = name.partition(".experts.")
        parts = {name: tensor}
        if projection == "gate_up_proj" and joins_experts:
            writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight", tensor.contiguous().numpy())
            continue
        if projection == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            parts = {f"{block}.experts.gate_proj.weight": gate, f"{block}.experts.up_proj.weight": up}
        elif projection:
            parts = {f"{name}.weight": tensor}
        elif ".norms." in name:
            stem, _, head = name.partition(".norms.")
            heads_of.setdefault(stem, []).append(tensor)
            assert head == f"{len(heads_of[stem]) - 1}.weight"
            count = config.num_attention_heads if ".q_" in stem else config.num_key_value_heads
            parts = {f"{stem}.weight": torch.stack(heads_of[stem])} if len(heads_of[stem]) == count else {}
        if ".linear_attn." in name:
            for own_name, converted in delta_tensors(name, tensor, architecture).items():
                writer.add_tensor(own_name, converted.contiguous().numpy())
            continue
        if mamba := mamba_tensors(name, tensor, 2):
            for own_name, made in mamba.items():
                writer.add_tensor(own_name, made.contiguous().numpy())
            continue
        shared = "shared_expert." if "expert_count" in own else ""
        if name.endswith("shared_mlp.input_linear.weight"):
            gate, up = tensor.chunk(2)
            parts = {
                name.replace("shared_mlp.input_linear", f"mlp.{shared}{own_name}_proj"): part
                for own_name, part in (("gate", gate), ("up", up))
            }
        if name.endswith("shared_mlp.output_linear.weight"):
            parts = {name.replace("shared_mlp.output_linear", f"mlp.{shared}down_proj"): tensor}
        parts = {part.replace("block_sparse_moe.experts", "mlp.experts"): each for part, each in parts.items()}
        if name.endswith("block_sparse_moe.router.weight"):
            parts = {name.replace("router", "router.layer"): tensor}
        if architecture.startswith("nemotron_h"):  # whose converter renames the stacks of experts alone
            parts = {
                part.replace("mixer", "mlp") if projection else part.replace("model.", "backbone."): each
                for part, each in parts.items()
            }
        if name.endswith(".kv_b_proj.weight") and "attention.key_length_mla" in own:
            heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, head_values = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            stem = name.removesuffix("kv_b_proj.weight")
            parts = {f"{stem}k_b_proj.weight": keys.mT, f"{stem}v_b_proj.weight": head_values}
        if name.endswith((".expert_bias", ".e_score_correction_bias")):
            layer = name.split(".")[2]
            writer.add_tensor(f"blk.{layer}.exp_probs_b.bias", tensor.flatten().numpy())
            continue
        if name.endswith(".shared_expert_gate.weight"):
            parts = {name: tensor[0]}
        for part, part_values in parts.items():
            array = part_values.contiguous().numpy()
            if architecture in _PERMUTED and (".q_proj." in part or ".k_proj." in part):
                heads = config.num_attention_heads if ".q_proj." in part else config.num_key_value_heads
                pairs = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
                array = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))
            if architecture in _NORMS_LESS_1 and part.endswith("norm.weight"):
                array = array + 1
            if ".conv.conv." in part:
                array = array[:, 0]
            if ".query_key_value." in part:
                heads = int(values["attention.head_count_kv"])
                groups = array.reshape(heads, -1, 16, *array.shape[1:])
                parted = (groups[:, :-2], groups[:, -2], groups[:, -1])
                array = np.concatenate([each.reshape(-1, *array.shape[1:]) for each in parted])
            own_name = part.removeprefix("transformer.") if architecture == "bloom" else part
            stored = names.get_name(own_name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, part
            writer.add_tensor(stored, array)
    for own_name, tensor in others.items():
        writer.add_tensor(own_name, tensor.numpy())
    for key, of_layers in numbers.items():
        writer.add_array(key, of_layers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def built(config: dict[str, Any], directory: Path) -> Any:
    """Build the model of a config, which is added to :data:`_COMMON`."""
    reference = reference_of(_COMMON | config, directory)
    for name, buffer in reference.named_buffers():
        if name.endswith((".expert_bias", "mixer.gate.e_score_correction_bias")):  # zeros, otherwise
            buffer.copy_(torch.tensor([0.5, -0.2, 0.1, 0.3]))
    generator = torch.Generator().manual_seed(0)
    for name, tensor in reference.named_parameters():
        if name.endswith((".D", ".dt_bias", "mamba.norm.weight", "mixer.norm.weight", "conv1d.bias")):  # or ones
            tensor.data.add_(torch.rand(tensor.shape, generator=generator) - 0.5)
    return reference


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_are_those_of_the_model(architecture: str, tmp_path: Path) -> None:
    own = FAMILIES[architecture][1]
    reference = built(FAMILIES[architecture][0], tmp_path)
    prompt = random_prompt(40)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    path = tmp_path / "model.gguf"
    write(architecture, reference, own, path, _OTHERS.get(architecture.partition(" ")[0], {}))
    source = GgufSource(path)
    model = load_model(source.config, source, dtype=torch.float32, placement=CPU)
    (scores,) = logits(model, paged(16)(model), [(prompt, 0, [0, 1, 2])])
    source.close()
    assert (scores - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("architecture", ["lfm2moe", "glm4moe", "granitemoe"])
def test_gates_and_ups_of_experts_may_be_in_one_tensor(architecture: str, tmp_path: Path) -> None:
    config, own = FAMILIES[architecture]
    reference, path, found = built(config, tmp_path), tmp_path / "model.gguf", []
    for joins_experts in (False, True):
        write(architecture, reference, own, path, joins_experts=joins_experts)
        source = GgufSource(path)
        found.append({name: source.tensor(name, torch.float32, CPU) for name in source.names()})
        source.close()
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name])


@pytest.mark.parametrize("size", [32, 48])  # gates with ups are square, or not
def test_transposed_experts_are_written_like_others(size: int, tmp_path: Path) -> None:
    """Qwen3-VL's released checkpoints have them transposed; transformers writes them as they are."""
    text = VISION_FAMILIES["qwen3_vl_moe"].config["text_config"] | {"mlp_only_layers": [], "num_hidden_layers": 1}
    text["moe_intermediate_size"] = size
    make_vision_checkpoint("qwen3_vl_moe", tmp_path / "model", text_config=text)
    weights, found = tmp_path / "model" / "model.safetensors", []
    for name in ("plain.gguf", "transposed.gguf"):
        source = GgufSource(write_gguf(tmp_path / "model", tmp_path / name, type="F32"))
        found.append({name: source.tensor(name, torch.float32, CPU) for name in source.names()})
        source.close()
        stored = load_file(weights).items()
        save_file({name: each.mT.contiguous() if ".experts." in name else each for name, each in stored}, weights)
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name])


def test_joined_experts_must_have_halves(tmp_path: Path) -> None:
    config, own = FAMILIES["lfm2moe"]
    path = tmp_path / "model.gguf"
    for shape in [(4, 63, 64), (64, 64), (5000, 2, 4)]:
        others = {"blk.2.ffn_gate_up_exps.weight": torch.zeros(shape)}
        write("lfm2moe", built(config | {"num_dense_layers": 4}, tmp_path), own, path, others)
        with pytest.raises(CheckpointError, match=r"ffn_gate_up_exps\.weight.* cannot be 2 parts"):
            GgufSource(path)


def test_a_shared_expert_that_the_metadata_does_not_state(tmp_path: Path) -> None:
    config, own = FAMILIES["granitemoe with a shared expert"]
    path = tmp_path / "model.gguf"
    write("granitemoe", built(config, tmp_path), {**own, "expert_shared_feed_forward_length": 0}, path)
    with pytest.raises(CheckpointError, match="cannot be a gate of 0 neurons"):
        GgufSource(path)


@pytest.mark.parametrize(
    ("architecture", "own", "told"),
    [
        ("olmo2", {"attention.sliding_window": 16, "attention.sliding_window_pattern": 3}, "sliding_window_pattern"),
        ("bloom", {"feed_forward_length": 128}, "feed_forward_length = 128"),
        (
            "falcon",
            {"attention.key_length": 8, "attention.value_length": 8, "rope.dimension_count": 8},
            "4 heads of 8 in a hidden size of 64",
        ),
        ("mpt", {"attention.max_alibi_bias": 0.0}, "max_alibi_bias = 0.0"),
    ],
)
def test_other_shapes_are_refused(architecture: str, own: dict[str, float], told: str, tmp_path: Path) -> None:
    config, usual = FAMILIES[architecture]
    path = tmp_path / "model.gguf"
    write(architecture, reference_of(_COMMON | config, tmp_path), {**usual, **own}, path)
    with pytest.raises(UnsupportedArchitectureError, match=told):
        GgufSource(path)


@pytest.mark.parametrize("numbers", [None, [0.5], [0.1] * 5, [0.1, 0.2, 0.3, "0.4"], True, [0.1, 0.2, 0.3, True]])
def test_numbers_of_layers_are_as_many_as_layers(numbers: object, tmp_path: Path) -> None:
    metadata = {key: [0.5] * 4 for key in ARCHITECTURES["apertus"].layer_numbers} | {"xielu.alpha_n": numbers}
    with pytest.raises(CheckpointError, match=r"metadata xielu\.alpha_n is .*: expected a number for each of 4 layers"):
        dict(number_weights(ARCHITECTURES["apertus"], metadata, 4, tmp_path))


def test_one_number_is_that_of_all_layers(tmp_path: Path) -> None:
    metadata = {"xielu.alpha_p": 0.5, "xielu.alpha_n": [0.1, 0.2], "xielu.beta": 1, "xielu.eps": -1e-6}
    found = dict(number_weights(ARCHITECTURES["apertus"], metadata, 2, tmp_path))
    assert [found[f"model.layers.{layer}.mlp.act_fn.alpha_p"].number for layer in range(2)] == [0.5, 0.5]
    assert found["model.layers.1.mlp.act_fn.alpha_n"].number == 0.2
    assert found["model.layers.0.mlp.act_fn.beta"].shape == ()


def test_groups_of_experts_of_a_softmax_are_scored_as_in_llama_cpp(tmp_path: Path) -> None:
    """By their two largest weights, where transformers' class takes the largest."""
    config, usual = FAMILIES["deepseek2 with a softmax"]
    path = tmp_path / "model.gguf"
    groups = {"expert_group_count": 4, "expert_group_used_count": 2}
    write("deepseek2", built(config, tmp_path), {**usual, **groups}, path)
    source = GgufSource(path)
    moe = read_config(source.config).moe
    source.close()
    assert moe is not None
    assert (moe.num_groups, moe.num_groups_per_token, moe.group_score_size) == (4, 2, 2)


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"expert_gating_func": 2}, "sigmoids as weights of experts without a bias"),
        ({"expert_weights_norm": True}, "normalized weights"),
        ({"attention.temperature_scale": 0.1}, "temperature_scale"),
        ({"rope.scaling.factor": 2.0}, "rope scaling 'none' by 2.0"),
    ],
)
def test_other_forms_of_deepseek2_are_refused(own: dict[str, Any], told: str, tmp_path: Path) -> None:
    config, usual = FAMILIES["deepseek2 with a softmax"]
    path = tmp_path / "model.gguf"
    write("deepseek2", built(config, tmp_path), {**usual, **own}, path)
    with pytest.raises(UnsupportedArchitectureError, match=told):
        GgufSource(path)


@pytest.mark.parametrize("counts", [[0, 0, 2], [0, 1, 2, 0], [0] * 4, [0, 0, -2, 0]])
def test_counts_of_heads_that_no_layers_have(counts: list[int], tmp_path: Path) -> None:
    config, usual = FAMILIES["lfm2"]
    path = tmp_path / "model.gguf"
    write("lfm2", reference_of(_COMMON | config, tmp_path), {**usual, "attention.head_count_kv": counts}, path)
    with pytest.raises(CheckpointError, match="head_count_kv"):
        GgufSource(path)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "falcon", **_TIED, **_WIDE, "alibi": True},
        {"model_type": "falcon", **_TIED, **_WIDE, "bias": True},
        {"model_type": "falcon", **_TIED, **_WIDE, "parallel_attn": False},
        {"model_type": "mpt", **_TIED, **_WIDE, "attn_config": {"softmax_scale": 0.5}},
        {"model_type": "olmo3", "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"model_type": "gptj", **_WIDE, "rotary_dim": 8},
        {"model_type": "lfm2", **_TIED, "layer_types": ["conv", "full_attention"] * 2, "conv_bias": True},
        {"model_type": "lfm2", **_TIED, "layer_types": ["full_attention"] * 4},
        FAMILIES["lfm2moe"][0] | {"routed_scaling_factor": 1.5},
        FAMILIES["lfm2moe"][0] | {"norm_topk_prob": False},
        FAMILIES["lfm2moe"][0] | {"use_expert_bias": False},
        FAMILIES["apertus"][0] | {"hidden_act": "relu2"},
        FAMILIES["glm4moe"][0] | {"n_shared_experts": 0},
        FAMILIES["deepseek2"][0] | {"q_lora_rank": None},
        FAMILIES["deepseek2"][0] | {"rope_interleave": False},
        FAMILIES["deepseek2"][0] | {"attention_bias": True},
        FAMILIES["deepseek2"][0] | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        FAMILIES["deepseek2"][0] | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        FAMILIES["deepseek2 with a softmax"][0]
        | {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
        FAMILIES["dots1"][0] | {"sliding_window": 16, "max_window_layers": 1},
        FAMILIES["dots1"][0] | {"attention_bias": True},
        FAMILIES["afmoe"][0] | {"attention_bias": True},
        FAMILIES["afmoe"][0] | {"mup_enabled": False},
        FAMILIES["afmoe"][0] | {"global_attn_every_n_layers": 2},
        FAMILIES["ernie4_5-moe"][0] | {"moe_layer_end_index": 2},
        FAMILIES["ernie4_5-moe"][0] | {"moe_norm_min": 0.3},
        FAMILIES["ernie4_5-moe"][0] | {"use_bias": True},
        FAMILIES["qwen3next"][0] | {"norm_topk_prob": False},
        FAMILIES["qwen3next"][0] | {"mlp_only_layers": [1]},
        FAMILIES["qwen3next"][0] | {"num_experts": 0},
        FAMILIES["qwen35"][0] | {"linear_value_head_dim": 16},
        FAMILIES["qwen35"][0] | {"attention_bias": True},
        FAMILIES["qwen35"][0] | {"layer_types": ["full_attention"] * 4},
        FAMILIES["granitehybrid"][0] | {"layer_types": ["full_attention"] * 4},
        FAMILIES["granitehybrid with experts"][0] | {"layer_types": ["full_attention"] * 4},
        FAMILIES["exaone-moe"][0] | {"layer_types": ["full_attention"] * 4},
        FAMILIES["mistral3"][0] | {"rope_parameters": {**_YARN, "mscale": 0.5}},
        FAMILIES["granitehybrid"][0] | {"mamba_proj_bias": True},
        FAMILIES["falcon-h1"][0] | {"mamba_rms_norm": True},
        FAMILIES["falcon-h1"][0] | {"attention_bias": True},
        FAMILIES["falcon-h1"][0] | {"mlp_bias": True},
        FAMILIES["falcon-h1"][0] | {"projectors_bias": True},
        FAMILIES["falcon-h1"][0] | _TIED | {"lm_head_multiplier": 0.5},
        FAMILIES["nemotron_h"][0] | {"use_bias": True},
        FAMILIES["nemotron_h"][0] | {"layers_block_type": ["linear_attention", "full_attention"]},
        FAMILIES["nemotron_h_moe"][0] | {"layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"]},
        FAMILIES["nemotron_h_moe"][0] | {"mlp_bias": True},
        FAMILIES["nemotron_h_moe"][0] | {"mlp_hidden_act": "silu"},
        FAMILIES["nemotron_h"][0] | {"mlp_hidden_act": "silu"},
        _MAMBA2 | {"use_bias": True},
        _MAMBA2 | {"use_conv_bias": False},
        _MAMBA2 | {"expand": 4, "num_heads": 8},
        {"model_type": "bamba", **_MAMBA, "attn_layer_indices": [1]},
    ],
)
def test_what_llama_cpp_does_not_compute_is_not_written(config: dict[str, Any], tmp_path: Path) -> None:
    reference_of(_COMMON | config, tmp_path).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    with pytest.raises(UnsupportedArchitectureError):
        write_gguf(tmp_path / "model", tmp_path / "written.gguf", type="F32")
    assert not (tmp_path / "written.gguf").exists()


@pytest.mark.parametrize(
    "architecture",
    [
        *("falcon", "falcon with two norms", "bloom", "stablelm with norms of heads"),
        *(
            "qwen35 with layers in no order",
            "qwen35moe",
            "granitehybrid",
            "granitehybrid with experts",
            "granitemoe with a shared expert",
            "mistral3",
            "apertus",
            "falcon-h1 with norms",
            "mamba2",
            "nemotron_h_moe with latent vectors",
        ),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("lfm2moe", "qwen3next")),
    ],
)
@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
def test_transformers_reads_what_becomes_of_a_file(architecture: str, tmp_path: Path) -> None:
    # Nemotron's least step is transformers' own: GGUF has no key for it, and it limits prompts alone.
    config = {key: value for key, value in FAMILIES[architecture][0].items() if key != "time_step_min"}
    reference = built(config, tmp_path)
    reference.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    path = write_gguf(tmp_path / "model", tmp_path / "written.gguf", type="F32")
    back = write_safetensors(path, tmp_path / "back", type="F32")
    attention = reference.config._attn_implementation
    read: Any = AutoModelForCausalLM.from_pretrained(back, attn_implementation=attention, dtype=torch.float32)
    prompt = torch.tensor([random_prompt(40)])
    with torch.inference_mode():
        expected, found = reference(prompt).logits, read.eval()(prompt).logits
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_multipliers_of_falcon_h1_are_in_the_weights(tmp_path: Path) -> None:
    reference = built(FAMILIES["falcon-h1"][0] | MULTIPLIERS, tmp_path)
    reference.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    source = GgufSource(write_gguf(tmp_path / "model", tmp_path / "written.gguf", type="F32"))
    model = load_model(source.config, source, dtype=torch.float32, placement=CPU)
    prompt = random_prompt(40)
    (scores,) = logits(model, paged(16)(model), [(prompt, 0, [0, 1, 2])])
    source.close()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert model.config.branch_scales is None
    assert (scores - expected).abs().max() < 1e-4 * expected.abs().max()


def test_granite_4_without_mamba_layers_is_granite(tmp_path: Path) -> None:
    whole = {"layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"}
    reference = built(FAMILIES["granitehybrid"][0] | whole, tmp_path)
    reference.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    source = GgufSource(write_gguf(tmp_path / "model", tmp_path / "written.gguf", type="F32"))
    assert source.config["model_type"] == source.metadata["general.architecture"] == "granite"
    model = load_model(source.config, source, dtype=torch.float32, placement=CPU)
    prompt = random_prompt(40)
    (scores,) = logits(model, paged(16)(model), [(prompt, 0, [0, 1, 2])])
    source.close()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert (scores - expected).abs().max() < 1e-4 * expected.abs().max()


@needs_library
def test_quantized_rows_keep_their_blocks_in_another_order(tmp_path: Path) -> None:
    config, _ = FAMILIES["falcon with two norms"]
    reference: Any = reference_of(_COMMON | config, tmp_path)
    reference.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    source = GgufSource(write_gguf(tmp_path / "model", tmp_path / "written.gguf", type="Q8_0"))
    policy = WeightPolicy(keep_blocks=True, workspace=workspace())
    model = load_model(source.config, source, dtype=torch.float32, placement=CPU, policy=policy)
    prompt = random_prompt(40)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    (scores,) = logits(model, paged(16)(model), [(prompt, 0, [0, 1, 2])])
    name = "transformer.h.1.self_attention.query_key_value.weight"
    whole = source.matrix(name)
    assert isinstance(whole, BlockMatrix)
    assert torch.equal(whole.rows(slice(5, 77)).decoded(), source.tensor(name, torch.float32, CPU)[5:77])
    source.close()
    # In blocks it takes 1.06 bytes of a weight.
    assert model.layers[0].linears[0].num_bytes < 2 * whole.shape[0] * whole.shape[1]
    assert (scores - expected).norm() < 0.2 * expected.norm()  # it is 0.05; in the file's order of rows 0.83


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_checkpoint_is_written_and_read_back(architecture: str, tmp_path: Path) -> None:
    reference = built(FAMILIES[architecture][0], tmp_path)
    reference.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    source = GgufSource(write_gguf(tmp_path / "model", tmp_path / "written.gguf", type="F32"))
    expected = reference.state_dict() | load_file(tmp_path / "model" / "model.safetensors")
    for name in source.names():
        if ".experts." not in name:
            # transformers names nemotron_h's as those of other models.
            stored = expected[name if name in expected else name.replace("backbone.", "model.")]
            own = stored.flatten() if name.endswith("correction_bias") else stored
            torch.testing.assert_close(source.tensor(name, torch.float32, CPU), own, rtol=0, atol=1e-6)
    config = read_config(source.config)
    source.close()
    own_config = read_config(reference.config.to_dict())
    if own_config.latent is not None and config.latent is not None:
        assert config.latent.norm_eps == pytest.approx(own_config.latent.norm_eps)
        config = evolve(config, latent=evolve(config.latent, norm_eps=own_config.latent.norm_eps))
    for field in ("norm_eps", "embedding_scale", "residual_scale", "attention_scale", "logit_scale"):
        assert getattr(config, field) == pytest.approx(getattr(own_config, field))
        config = evolve(config, **{field: getattr(own_config, field)})
    ropes = [rope.rotates for rope in own_config.ropes]
    assert evolve(config, ropes=own_config.ropes) == own_config
    assert [rope.rotates for rope in config.ropes] == ropes


@pytest.mark.parametrize("architecture", ["nemotron_h_moe", "nemotron_h_moe with latent vectors"])
def test_stacked_experts_without_gates_are_written_like_others(architecture: str, tmp_path: Path) -> None:
    """As transformers keeps them in memory."""
    built(FAMILIES[architecture][0], tmp_path).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    apart = write_gguf(tmp_path / "model", tmp_path / "apart.gguf", type="F32")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    stacks: dict[str, list[torch.Tensor]] = {}
    for name in sorted(each for each in stored if ".experts." in each):
        block, _, projection = name.removesuffix(".weight").rpartition(".")
        stacks.setdefault(f"{block.rpartition('.')[0]}.{projection}", []).append(stored.pop(name))
    assert {len(each) for each in stacks.values()} == {4}
    save_file(stored | {name: torch.stack(each) for name, each in stacks.items()}, tmp_path / "model/model.safetensors")
    stacked = write_gguf(tmp_path / "model", tmp_path / "stacked.gguf", type="F32")
    found, expected = (
        {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(path).tensors} for path in (stacked, apart)
    )
    assert found == expected


@pytest.mark.parametrize("sizes", [{"intermediate_size": 96}, {"moe_shared_expert_intermediate_size": 16}])
def test_sizes_beside_those_of_experts(sizes: dict[str, int], tmp_path: Path) -> None:
    """Of MLPs that no layer has; of a shared expert that is smaller than another expert."""
    reference = built(FAMILIES["nemotron_h_moe"][0] | sizes, tmp_path)
    reference.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    source = GgufSource(write_gguf(tmp_path / "model", tmp_path / "written.gguf", type="F32"))
    moe = read_config(source.config).moe
    source.close()
    assert moe == read_config(reference.config.to_dict()).moe

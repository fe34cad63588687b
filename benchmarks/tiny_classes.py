"""Make tiny models with random weights of every class of transformers that generates text."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["MODEL_TYPES", "OWN", "SMALL", "VOCAB_SIZE", "make_lively", "tiny_config", "tiny_model"]

VOCAB_SIZE: Final = 256
MODEL_TYPES: Final = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

# Names of config fields, with a small value for each; set where a class has the field.
SMALL: Final = MappingProxyType(
    {
        **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "n_vocab"), VOCAB_SIZE),
        **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 64),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads"), 4),
        **dict.fromkeys(("num_key_value_heads", "kv_n_heads", "num_kv_heads"), 2),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "n_inner", "dff"), 96),
        **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32),
        **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
        **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"), 128),
        **dict.fromkeys(("sliding_window", "attention_window_size", "window_size"), 8),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "kv_lora_dim"), 16),
        **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "attention_head_dim"), 16),
        "qk_rope_head_dim": 8,
        "rotary_dim": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "is_decoder": True,
        "use_cache": True,
    }
)

# Additional fields of some classes.
_MLA: Final[dict[str, Any]] = {"head_dim": 8, "num_key_value_heads": 4}
_BYTES: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "hidden_size_global": 64,
    "intermediate_size": 96,
    "vocab_size": VOCAB_SIZE,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
    "num_hidden_layers": 2,
    "head_dim": 16,
}
OWN: Final[MappingProxyType[str, dict[str, Any]]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text", "glm4_moe_lite"),
                *("glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"),
            ),
            _MLA,
        ),
        "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
        "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
        "moshi": {"sliding_window": 64},
        "mamba2": {"num_heads": 8},
        "blt": {
            "encoder_hash_byte_group_vocab": 64,
            **dict.fromkeys(("patcher_config", "encoder_config", "decoder_config", "global_config"), _BYTES),
        },
        "zaya": {"num_experts_per_tok": 1},
        "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
        "cohere_compass_text": {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 10_000.0}
                for kind in ("sliding_attention", "full_attention")
            },
        },
        "dbrx": {"attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
        "qwen4_exp_text": {"layer_types": ["linear_attention", "full_attention"] * 2},
        "zamba2": {"layer_types": ["mamba", "hybrid"] * 2},
        "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
        "reformer": {"axial_pos_embds": False},
        "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "inkling_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    }
)


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return the smallest config that still has the class's distinctive features."""
    config_class = CONFIG_MAPPING[model_type]
    known = {*config_class().to_dict(), *config_class.attribute_map.values()}
    fields = {name: number for name, number in SMALL.items() if name in known}
    made = config_class(**(fields | OWN.get(model_type, {}) | changes))
    assert isinstance(made, PreTrainedConfig)
    return made


def tiny_model(model_type: str, auto: Any = AutoModelForCausalLM, **changes: Any) -> PreTrainedModel:
    """Make the model in float32. Its weights are larger than trained ones, so that wrong masks or positions show.

    :param auto: the Auto class that finds the model's class
    :param changes: fields of its config
    """
    torch.manual_seed(0)
    make: Any = auto.from_config
    model: PreTrainedModel = make(
        tiny_config(model_type, **changes), attn_implementation="eager", dtype=torch.float32
    ).eval()
    make_lively(model)
    return model


def make_lively(model: PreTrainedModel) -> None:
    """Give a model random weights that are larger than trained ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.1)

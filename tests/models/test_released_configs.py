"""Configs of released checkpoints with mixtures of experts: what they state beside what transformers' classes read."""

from __future__ import annotations

from typing import Any, Final

import pytest
from attrs import evolve

from paged_sdk.config.decoder import AttentionGate, DecoderConfig
from paged_sdk.config.moe import MoeConfig
from paged_sdk.errors import CheckpointError
from paged_sdk.models.family import read_config

_DEEPSEEK: Final[dict[str, Any]] = {
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
}
_LATENT: Final[dict[str, Any]] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_SIGMOIDS: Final[dict[str, Any]] = {
    "sigmoid_scores": True,
    "has_choice_bias": True,
    "group_score_size": 2,
    "sum_offset": 1e-20,
    "float32_router": True,
}


def sizes(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
    }


def experts(count: int, chosen: int, size: int, shared: int) -> dict[str, Any]:
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": size,
        "n_shared_experts": shared,
    }


RELEASED: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "DeepSeek-V3": (
        sizes(7168, 18_432, 61, 128, 128, 129_280)
        | experts(256, 8, 2048, 1)
        | _DEEPSEEK
        | _LATENT
        | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 1536}
        | {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
        | {"ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001},
        {"layers": 58, "experts": (256, 8, 2048, 2048), "num_groups": 8, "num_groups_per_token": 4, "routed_scale": 2.5}
        | _SIGMOIDS,
    ),
    "DeepSeek-V2-Lite": (
        sizes(2048, 10_944, 27, 16, 16, 102_400)
        | experts(64, 6, 1408, 2)
        | _DEEPSEEK
        | _LATENT
        | {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
        | {"norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy"},
        {"layers": 26, "experts": (64, 6, 1408, 2816), "renormalize": False, "float32_router": True},
    ),
    "dots.llm1": (
        sizes(4096, 10_944, 62, 32, 32, 152_064)
        | experts(128, 6, 1408, 2)
        | _DEEPSEEK
        | {"model_type": "dots1", "architectures": ["Dots1ForCausalLM"], "head_dim": 128, "attention_bias": False}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5}
        | {"scoring_func": "noaux_tc", "sliding_window": None, "max_window_layers": 62, "use_sliding_window": False},
        {"layers": 61, "experts": (128, 6, 1408, 2816), "routed_scale": 2.5} | _SIGMOIDS,
    ),
    "K-EXAONE": (
        sizes(6144, 18_432, 48, 64, 8, 153_600)
        | _DEEPSEEK
        | {"model_type": "exaone_moe", "architectures": ["ExaoneMoEForCausalLM"], "head_dim": 128}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "num_shared_experts": 1}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5}
        | {"layer_types": [*["sliding_attention"] * 3, "full_attention"] * 12, "sliding_window": 128}
        | {"sliding_window_pattern": "LLLG", "mlp_layer_types": ["dense", *["sparse"] * 47]},
        {"layers": 47, "experts": (128, 8, 2048, 2048), "routed_scale": 2.5} | _SIGMOIDS,
    ),
    "GLM-4.5-Air": (
        sizes(4096, 10_944, 46, 96, 8, 151_552)
        | experts(128, 8, 1408, 1)
        | {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "head_dim": 128, "attention_bias": True}
        | {"partial_rotary_factor": 0.5, "use_qk_norm": False, "norm_topk_prob": True, "num_nextn_predict_layers": 1}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        {"layers": 45, "experts": (128, 8, 1408, 1408)} | _SIGMOIDS,
    ),
    "Trinity-Mini": (
        sizes(2048, 6144, 32, 32, 4, 200_192)
        | {"model_type": "afmoe", "architectures": ["AfmoeForCausalLM"], "head_dim": 128, "mup_enabled": True}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "num_shared_experts": 1}
        | {"num_dense_layers": 2, "n_group": 1, "topk_group": 1, "num_expert_groups": 1, "num_limited_groups": 1}
        | {"route_norm": True, "route_scale": 2.826, "score_func": "sigmoid", "load_balance_coeff": 0.001}
        | {"layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8, "sliding_window": 2048}
        | {"global_attn_every_n_layers": 4, "rope_theta": 10_000, "rope_scaling": None, "use_grouped_mm": True},
        {"layers": 30, "experts": (128, 8, 1024, 1024), "routed_scale": 2.826} | _SIGMOIDS | {"float32_router": False},
    ),
    "MiniMax-M2": (
        sizes(3072, 1536, 62, 48, 8, 200_064)
        | {"model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 128, "rotary_dim": 64}
        | {"num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid", "use_routing_bias": True}
        | {"attn_type_list": [1] * 62, "mlp_intermediate_size": 8192, "num_mtp_modules": 3, "use_mtp": True}
        | {"qk_norm_type": "per_layer", "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid"},
        {"layers": 62, "experts": (256, 8, 1536, None), "sigmoid_scores": True, "has_choice_bias": True},
    ),
    "ERNIE-4.5-21B-A3B": (
        sizes(2560, 12_288, 28, 20, 4, 103_424)
        | {"model_type": "ernie4_5_moe", "architectures": ["Ernie4_5_MoeForCausalLM"], "use_bias": False}
        | {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": 29, "moe_layer_interval": 1, "moe_gate": "topk"}
        | {"moe_capacity": [64, 64, 64], "moe_use_aux_free": True, "num_nextn_predict_layers": 1},
        {"layers": 27, "experts": (64, 6, 1536, 3072), "has_choice_bias": True, "min_sum": 1e-12}
        | {"float32_router": True},
    ),
    "Granite-3.1-1B-A400M": (
        sizes(1024, 512, 24, 16, 8, 49_155)
        | {"model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"], "num_local_experts": 32}
        | {"num_experts_per_tok": 8, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0}
        | {"logits_scaling": 6.0, "residual_multiplier": 0.22, "tie_word_embeddings": True},
        {"layers": 24, "experts": (32, 8, 512, None)},
    ),
    "Hunyuan-A13B": (
        sizes(4096, 3072, 32, 32, 8, 128_167)
        | {"model_type": "hunyuan_v1_moe", "architectures": ["HunYuanMoEV1ForCausalLM"], "attention_head_dim": 128}
        | {"num_experts": 64, "moe_topk": [8] * 32, "moe_intermediate_size": [3072] * 32}
        | {"num_shared_expert": [1] * 32, "use_mixed_mlp_moe": True, "use_qk_norm": True, "use_cla": False}
        | {"n_group": False, "topk_group": False, "routed_scaling_factor": False, "norm_topk_prob": True}
        | {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "beta_fast": 32}},
        {"layers": 32, "experts": (64, 8, 3072, 3072), "float32_router": True},
    ),
}
"""By checkpoint: fields of its config, and how its experts are chosen; what is not said is :class:`MoeConfig`'s own."""


@pytest.mark.parametrize("name", RELEASED)
def test_experts_are_read_as_they_were_trained(name: str) -> None:
    config, said = RELEASED[name]
    shape = read_config(config)
    count, chosen, size, shared = said["experts"]
    expected = MoeConfig(
        layers=frozenset(range(shape.num_layers - said["layers"], shape.num_layers)),
        num_experts=count,
        num_experts_per_token=chosen,
        intermediate_size=size,
        shared_intermediate_size=shared,
        renormalize=True,
    )
    assert shape.moe == evolve(expected, **{key: said[key] for key in said.keys() - {"layers", "experts"}})


def test_what_else_they_have() -> None:
    shapes: dict[str, DecoderConfig] = {name: read_config(config) for name, (config, _) in RELEASED.items()}
    assert {name for name, shape in shapes.items() if shape.qk_norm} == {
        *("dots.llm1", "K-EXAONE", "MiniMax-M2", "Hunyuan-A13B", "Trinity-Mini")
    }
    assert {name for name, shape in shapes.items() if shape.ropes[0].rotary_dim < shape.head_dim} == {
        *("DeepSeek-V3", "DeepSeek-V2-Lite", "GLM-4.5-Air", "MiniMax-M2")
    }
    assert set(shapes["K-EXAONE"].sliding_windows) == {128, None}
    trinity = shapes["Trinity-Mini"]
    assert trinity.sliding_windows == (2048, 2048, 2048, None) * 8
    assert [rope.rotates for rope in trinity.ropes] == [True, True, True, False] * 8
    assert (trinity.embedding_scale, trinity.attention_gate) == (2048**0.5, AttentionGate.APART)
    assert shapes["Hunyuan-A13B"].ropes[0].theta == pytest.approx(11_158_840, rel=1e-6)
    assert shapes["Granite-3.1-1B-A400M"].logit_scale == 1 / 6


@pytest.mark.parametrize(
    ("name", "scoring"), [("DeepSeek-V3", "softmax"), ("DeepSeek-V2-Lite", "sigmoid"), ("GLM-4.5-Air", "sqrtsoftplus")]
)
def test_scores_of_another_kind_are_refused(name: str, scoring: str) -> None:
    with pytest.raises(CheckpointError, match=f"scoring_func = '{scoring}': expected"):
        read_config(RELEASED[name][0] | {"scoring_func": scoring})


@pytest.mark.parametrize(
    ("key", "value"),
    [("score_func", "softmax"), ("route_norm", False), *((key, 2) for key in ("n_group", "num_expert_groups"))],
)
def test_another_choice_of_trinitys_experts_is_refused(key: str, value: object) -> None:
    """That transformers' class does not read: it would compute another model."""
    with pytest.raises(CheckpointError, match=f"{key} = .*: expected"):
        read_config(RELEASED["Trinity-Mini"][0] | {key: value})
